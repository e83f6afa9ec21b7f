"""Compiles device sources once per machine and caches the libraries in the user's cache folder.

A cache entry's key is a digest of its sources, headers, flags, arch and compiler. An entry is a folder with the library
and a manifest with the library's digest; both are checked before loading, and a library that fails the check is built
again. ``ACCELPATCH_KERNELS`` names a folder of prebuilt libraries (``export``) for machines without a compiler: it is
searched before the cache, and a library there that fails the check is an error.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelpatch import cache
from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.build import occupancy, resources
from accelpatch.kernels.build.targets import Target, compiler, no_compiler, target, unknown_arch

__all__ = [
    "Target", "built", "compiler", "export", "forget", "library", "locate", "place", "report", "target", "why_not",
]  # fmt: skip
KIND = "kernels"
LIBRARY, MANIFEST = "library.so", "manifest.json"
SECONDS = 600  # time limit of one compiler run; each source takes less than a tenth of it
LINES = 20  # last lines of a failing compiler's output that the error shows
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


def why_not(name: str, device: Device) -> str | None:
    """Why `library` would fail, as far as is known without compiling; None where it should work."""
    if name == "hip" and (unknown := unknown_arch(device)):
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
    return None if compiler(made) else no_compiler(made)


def forget() -> None:
    """Forget remembered failures, so that builds are tried again."""
    with _lock:
        _failed.clear()


def locate(name: str, made: Target) -> Path:
    """The folder of a library that matches its manifest: prebuilt, cached, or built now."""
    if prebuilt := os.environ.get("ACCELPATCH_KERNELS"):
        return _prebuilt(place(prebuilt, name, made), made)
    return built(name, made)


def built(name: str, made: Target) -> Path:
    """The cached folder of a library; compiles it where there is none that matches its manifest."""
    path = compiler(made)
    if path is None:
        raise KernelError(no_compiler(made))
    wanted = key(name, made, path)
    found = cache.publish(KIND, wanted, lambda folder: compile_into(folder, made, path))
    if wrong := _disagreement(found, digest(made)):
        cache.remove(KIND, wanted)
        found = cache.publish(KIND, wanted, lambda folder: compile_into(folder, made, path))
        if _disagreement(found, digest(made)):
            raise KernelError(f"{found / LIBRARY} {wrong}, also when it was built again: run `accelpatch cache clear`")
    return found


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


def report(made: Target) -> list[dict[str, Any]]:
    """Registers, spills, shared memory and occupancy of each kernel of a GPU library; compiles its sources again."""
    return [{**asdict(used), "waves": occupancy.waves(made.arch, used)} for used in resources.of_target(made)]


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
    whole = hashlib.sha256(f"{digest(made)}\n{identity(path)}".encode()).hexdigest()
    return f"{name}-{made.arch}-{whole[:24]}"


@functools.cache
def identity(path: str) -> str:
    """The compiler's resolved path and version text."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the compiler {path} does not start ({error}): name another") from error
    return f"{os.path.realpath(path)}\n{said}"


def compile_into(folder: Path, made: Target, path: str) -> None:
    """Compile all sources in parallel and link them; writes the library and its manifest into `folder`."""
    objects = {source: folder / f"{source}.o" for source in made.sources}
    commands = [
        [path, *made.flags, *flags, "-c", str(made.home / source), "-o", str(objects[source])]
        for source, flags in made.sources.items()
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(lambda command: _run(command, made.variable), commands))
    finished = folder / LIBRARY
    _run([path, *made.link, *map(str, objects.values()), "-o", str(finished)], made.variable)
    for file in objects.values():
        file.unlink()
    facts = {"made_of": digest(made), "sha256": _sha256(finished), "compiler": identity(path)}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1))


def _run(command: list[str], variable: str) -> None:
    advice = (
        f"mend or update the compiler, name another in {variable}, or do without: torch's own operations are used then"
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{command[0]} did not run ({error}): {advice}") from error
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-LINES:])
        raise KernelError(f"{' '.join(command)} failed with status {done.returncode}:\n{said}\n{advice}")


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
