"""Libraries that were compiled elsewhere: those in the folder ``ACCELPATCH_KERNELS``, then those of the wheel.

Each is in a folder of its own, ``LIBRARY-ARCH``, with a manifest that has the digests of its sources and of the
library. Both are checked before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from accelpatch import cache
from accelpatch.errors import CacheError, LibraryError
from accelpatch.kernels.compiling.entries import disagreement
from accelpatch.kernels.compiling.targets import Target

LIBRARY = "library.so"
HEADERS = (".h", ".hpp", ".inc")
VARIABLE = "ACCELPATCH_KERNELS"
#: what scripts/build_wheel.py puts into a wheel; a checkout has none
SHIPPED = Path(__file__).parent.parent / "prebuilt"
ROOT_USER = 0

#: folder of a shipped library -> why it is not loaded, None where it is; checked once a process
_looked_at: dict[Path, str | None] = {}


def place(folder: str | Path, name: str, made: Target) -> Path:
    """The path of a library inside a folder of prebuilt libraries, which may hold several archs."""
    return Path(folder).expanduser() / f"{name}-{made.arch}"


def find(name: str, made: Target) -> Path | None:
    """The folder of a prebuilt library; None where the library has to be built.

    Raises LibraryError for one of ``ACCELPATCH_KERNELS`` that is not there, does not match, or that others may write.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return shipped(name, made)
    folder = place(named, name, made)
    if reason := lacking(folder) or _open_to_others(folder):
        raise LibraryError(reason)
    if wrong := disagreement(folder, digest(made), LIBRARY):
        raise LibraryError(
            f"{folder / LIBRARY}, from {VARIABLE}, {wrong}: build it again with this version of accelpatch"
            f" on a machine of this kind, or unset {VARIABLE}"
        )
    return folder


def why_not(name: str, made: Target) -> str | None:
    """Why a library in ``ACCELPATCH_KERNELS``, which is set, cannot be loaded, as far as is known without reading
    it."""
    folder = place(os.environ[VARIABLE], name, made)
    return lacking(folder) or _open_to_others(folder)


def lacking(folder: Path) -> str | None:
    """Why a library is missing in ``ACCELPATCH_KERNELS``; None where it is there."""
    if folder.is_dir():
        return None
    return f"{VARIABLE} has no {folder.name} in {folder.parent}: add it with `accelpatch build`, or unset {VARIABLE}"


def _open_to_others(folder: Path) -> str | None:
    """Why a folder of ``ACCELPATCH_KERNELS`` is not loaded from: somebody else could put a library there."""
    advice = f"set {VARIABLE} to a folder of your own"
    try:
        for path in (folder.parent, folder, *sorted(folder.iterdir())):
            cache.check_private(path, f"{VARIABLE}:", advice, owners=(os.geteuid(), ROOT_USER))
    except CacheError as error:
        return str(error)
    except OSError as error:
        return f"{VARIABLE}: {folder} cannot be read ({error.strerror}): {advice}"
    return None


def shipped(name: str, made: Target) -> Path | None:
    """The folder of a library that came with accelpatch; None where there is none, or one of other sources."""
    folder = place(SHIPPED, name, made)
    return folder if folder.is_dir() and damage(folder, made) is None else None


def damage(folder: Path, made: Target) -> str | None:
    """Why a library that came with accelpatch is not loaded; None where it is. Checked once a process."""
    if folder not in _looked_at:
        _looked_at[folder] = disagreement(folder, digest(made), LIBRARY)
    return _looked_at[folder]


def refuse(folder: Path, why: str) -> None:
    """Do not load a library that came with accelpatch any more in this process. why: the reason for messages."""
    _looked_at[folder] = why


def lost(name: str, made: Target) -> str:
    """What is wrong with a library that came with accelpatch and is not loaded, as the beginning of a message; or
    ""."""
    folder = place(SHIPPED, name, made)
    if not folder.is_dir() or (wrong := damage(folder, made)) is None:
        return ""
    return f"{folder / LIBRARY}, which came with accelpatch, {wrong}: install accelpatch again, or a compiler; "


def digest(made: Target) -> str:
    """SHA-256 over everything that a library is made of, except the compiler."""
    folder = made.home
    headers = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in HEADERS)
    files = sorted([*made.sources, *headers])
    facts = [made.arch, made.flags, made.link, sorted(made.sources.items())]
    total = hashlib.sha256(json.dumps(facts).encode())
    for file in files:
        content = (folder / file).read_bytes()
        total.update(f"\n{file} {len(content)}\n".encode() + content)
    return total.hexdigest()
