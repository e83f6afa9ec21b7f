"""Compiles device sources once per machine and caches the libraries in the user's cache folder.

`prepare` builds those that a plan needs side by side; `library` builds one at its first use. Both say so on stderr.

A cache entry's key is a digest of its sources, headers, flags, arch and compiler. An entry is a folder with the library
and a manifest with the library's digest; both are checked before loading, and a library that fails the check is built
again. ``ACCELPATCH_KERNELS`` names a folder of prebuilt libraries (``export``) for machines without a compiler: it is
searched before the cache, and a library there that fails the check is an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelpatch import cache
from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.build import ck_libraries, occupancy, resources
from accelpatch.kernels.build.ck_libraries import CK_LIBRARIES
from accelpatch.kernels.build.compiling import compile_and_link, identity
from accelpatch.kernels.build.gpu_libraries import GPU_LIBRARIES
from accelpatch.kernels.build.targets import Target, compiler, missing, names_of, not_for_ck, target, unknown_arch

__all__ = [
    "Target", "build", "built", "compiler", "export", "forget", "library", "locate", "names_of", "place", "prepare",
    "report", "target", "why_not",
]  # fmt: skip
KIND = "kernels"
LIBRARY, MANIFEST = "library.so", "manifest.json"
SHOWN = 6  # most names in the line that says what is compiled
HEADERS = (".h", ".hpp", ".inc")

_lock = threading.Lock()
_loaded: dict[tuple[str, str], ctypes.CDLL] = {}
_failed: dict[tuple[str, str], str] = {}


def library(name: str, device: Device) -> ctypes.CDLL:
    """Load the library `name` for `device`, building it if needed; once per process.

    Raises KernelError, with what to do, where there is no compiler, the compiler fails (with its last lines), or a
    prebuilt library does not match; CacheError where the cache folder is not private. A failure is remembered and not
    retried.
    """
    made = target(name, device)
    at = (name, made.arch)
    with _lock:
        if at in _loaded:
            return _loaded[at]
        if at in _failed:
            raise KernelError(_failed[at])
        try:
            _loaded[at] = ctypes.CDLL(str(locate(name, made) / LIBRARY))
        except (KernelError, OSError) as error:
            _failed[at] = str(error)
            raise KernelError(_failed[at]) from error
        return _loaded[at]


def prepare(names: Sequence[str], device: Device, why: str = "") -> None:
    """Load libraries that will be used; those that are missing are compiled first, all sources side by side.

    why: what needs them, for the line on stderr. Raises as `library` does, before anything is loaded.
    """
    new = [name for name in names if (name, target(name, device).arch) not in _loaded]
    if new and not os.environ.get("ACCELPATCH_KERNELS"):
        for name, found in zip(new, _side_by_side(new, device, why), strict=True):
            if isinstance(found, KernelError):
                _failed[name, target(name, device).arch] = str(found)
    for name in new:  # the first that failed raises
        library(name, device)


def build(names: Sequence[str], device: Device) -> list[Path]:
    """The cached folders of libraries; those that are missing are compiled, all sources side by side.

    Raises KernelError for the first that fails, with its name.
    """
    folders = []
    for found in _side_by_side(names, device):
        if isinstance(found, KernelError):
            raise found
        folders.append(found)
    return folders


def _side_by_side(names: Sequence[str], device: Device, why: str = "") -> list[Path | KernelError]:
    def folder(one: tuple[str, Target]) -> Path | KernelError:
        try:
            return built(*one)
        except KernelError as error:
            return error

    wanted = [(name, target(name, device)) for name in names]
    with _announced(wanted, why), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(folder, wanted))


@contextmanager
def _announced(wanted: Sequence[tuple[str, Target]], why: str = "") -> Iterator[None]:
    """Says on stderr which libraries are compiled, and how long it took; nothing where all are there."""
    keys = {name: key(name, made, str(compiler(made))) for name, made in wanted if missing(made) is None}
    new = [name for name in keys if cache.entry(KIND, keys[name]) is None]
    if not new:
        yield
        return
    made = dict(wanted)[new[0]]
    count = "1 kernel library" if len(new) == 1 else f"{len(new)} kernel libraries"
    by, reason = Path(str(compiler(made))).name, f" for {why}" * bool(why)
    listed = ", ".join([*new[:SHOWN], *["..."] * (len(new) > SHOWN)])
    _say(f"compiling {count} of {made.arch} with {by}{reason} ({listed}), once for this machine")
    began = time.perf_counter()
    yield
    if all(cache.entry(KIND, keys[name]) for name in new):
        _say(f"compiled in {time.perf_counter() - began:.1f} s")


def _say(line: str) -> None:
    print(f"accelpatch: {line}", file=sys.stderr, flush=True)


def why_not(name: str, device: Device) -> str | None:
    """Why `library` would fail, as far as is known without compiling; None where it should work."""
    if name in CK_LIBRARIES and (other := not_for_ck(device)):
        return other
    if name in GPU_LIBRARIES and (unknown := unknown_arch(device)):
        return unknown
    made = target(name, device)
    at = (name, made.arch)
    if at in _loaded:
        return None
    if at in _failed:
        return _failed[at]
    if prebuilt := os.environ.get("ACCELPATCH_KERNELS"):
        return None if (folder := place(prebuilt, name, made)).is_dir() else _not_prebuilt(folder)
    if device.kind == "cuda" and device.index is None:
        return None  # a plan for another machine, whose compiler is not known here
    return missing(made)


def forget() -> None:
    """Forget remembered failures, so that builds are tried again."""
    with _lock:
        _failed.clear()


def locate(name: str, made: Target) -> Path:
    """The folder of a library that matches its manifest: prebuilt, cached, or built now."""
    if prebuilt := os.environ.get("ACCELPATCH_KERNELS"):
        return _prebuilt(place(prebuilt, name, made), made)
    with _announced([(name, made)]):
        return built(name, made)


def built(name: str, made: Target) -> Path:
    """The cached folder of a library; compiles it where there is none that matches its manifest."""
    if reason := missing(made):
        raise KernelError(reason)
    path = str(compiler(made))
    wanted = key(name, made, path)

    def write(folder: Path) -> None:
        try:
            compile_into(folder, made, path)
        except KernelError as error:
            raise KernelError(f"the kernel library {name} for {made.arch} was not built: {error}") from error

    found = cache.publish(KIND, wanted, write)
    if wrong := _disagreement(found, digest(made)):
        cache.remove(KIND, wanted)
        found = cache.publish(KIND, wanted, write)
        if _disagreement(found, digest(made)):
            raise KernelError(f"{found / LIBRARY} {wrong}, also when it was built again: run `accelpatch cache clear`")
    return found


def fingerprint(name: str, device: Device) -> str:
    """SHA-256 of the library `name` for `device`, building it if needed; why there is none, where there is none."""
    try:
        return _sha256(locate(name, target(name, device)) / LIBRARY)
    except KernelError as error:
        return str(error)


def place(folder: str | Path, name: str, made: Target) -> Path:
    """The path of a library inside a folder of prebuilt libraries, which may hold several archs."""
    return Path(folder).expanduser() / f"{name}-{made.arch}"


def export(name: str, device: Device, folder: Path) -> Path:
    """Build the library `name` into `folder`, for machines whose ACCELPATCH_KERNELS names it; returns its subfolder."""
    made = target(name, device)
    finished, into = built(name, made), place(folder, name, made)
    try:
        into.mkdir(parents=True, exist_ok=True)
        for file in (LIBRARY, MANIFEST):
            shutil.copyfile(finished / file, into / file)
    except OSError as error:
        raise KernelError(f"{into} cannot be written ({error.strerror}); choose another folder") from None
    return into


def report(targets: Sequence[Target]) -> list[list[dict[str, Any]]]:
    """Registers, spills, shared memory and occupancy of each kernel of GPU libraries; compiles their sources again."""

    def of_one(made: Target) -> list[dict[str, Any]]:
        return [{**asdict(used), "waves": occupancy.waves(made.arch, used)} for used in resources.of_target(made)]

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(of_one, targets))


def digest(made: Target) -> str:
    """SHA-256 over everything that a library is made of, except the compiler."""
    folder = made.home
    files = sorted([*made.sources, *(path.name for path in folder.iterdir() if path.suffix in HEADERS)])
    facts = [made.arch, made.flags, made.link, sorted(made.sources.items())]
    total = hashlib.sha256(json.dumps(facts).encode())
    for file in files:
        content = (folder / file).read_bytes()
        total.update(f"\n{file} {len(content)}\n".encode() + content)
    return total.hexdigest()


def key(name: str, made: Target, path: str) -> str:
    """The name of the cache entry."""
    include = ck_libraries.version(made.include) if made.include else ""
    whole = hashlib.sha256(f"{digest(made)}\n{identity(path)}{include}".encode()).hexdigest()
    return f"{name}-{made.arch}-{whole[:24]}"


def compile_into(folder: Path, made: Target, path: str) -> None:
    """Compile and link; writes the library and its manifest into `folder`."""
    finished = folder / LIBRARY
    compile_and_link(made, path, finished)
    facts = {"made_of": digest(made), "sha256": _sha256(finished), "compiler": identity(path)}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1))


def _prebuilt(folder: Path, made: Target) -> Path:
    if not folder.is_dir():
        raise KernelError(_not_prebuilt(folder))
    if wrong := _disagreement(folder, digest(made)):
        raise KernelError(
            f"{folder / LIBRARY}, from ACCELPATCH_KERNELS, {wrong}: build it again with this version of accelpatch"
            " on a machine of this kind, or unset ACCELPATCH_KERNELS"
        )
    return folder


def _disagreement(folder: Path, made_of: str) -> str | None:
    """Why a library does not match its manifest or the wanted sources; None where it does."""
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        found = _sha256(folder / LIBRARY)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "has a manifest that cannot be read"
    if not isinstance(facts, dict) or facts.get("made_of") != made_of:
        return "was made of other sources"
    return None if facts.get("sha256") == found else "is not what was built (its digest differs)"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _not_prebuilt(folder: Path) -> str:
    return (
        f"ACCELPATCH_KERNELS has no {folder.name} in {folder.parent}: add it with `accelpatch build`,"
        " or unset ACCELPATCH_KERNELS"
    )
