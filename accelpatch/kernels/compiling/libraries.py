"""Compiles device sources once per machine and caches the libraries in the user's cache folder.

`prepare` builds those that a plan needs side by side; `library` builds one at its first use. Both say so on stderr.

A cache entry's key is a digest of its sources, headers, flags, arch and compiler. An entry is a folder with the library
and a manifest with the library's digest; both are checked before loading, and a library that fails the check, or that
the system does not load, is built again. Two places come before the cache (prebuilt.py): the folder that
``ACCELPATCH_KERNELS`` names (``export``), where a library that fails the check is an error, and the wheel's own.
"""

from __future__ import annotations

import ctypes
import hashlib
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
from accelpatch.errors import KernelError, LibraryError
from accelpatch.kernels.compiling import ck_libraries, entries, occupancy, prebuilt, resources
from accelpatch.kernels.compiling.ck_libraries import CK_LIBRARIES
from accelpatch.kernels.compiling.compiler import compile_and_link, identity
from accelpatch.kernels.compiling.entries import KIND, MANIFEST, shared_library
from accelpatch.kernels.compiling.gpu_libraries import GPU_LIBRARIES
from accelpatch.kernels.compiling.prebuilt import LIBRARY, digest, place
from accelpatch.kernels.compiling.targets import Target, compiler, missing, names_of, not_for_ck, target, unknown_arch

__all__ = [
    "Target", "build", "built", "compiler", "digest", "export", "forget", "library", "locate", "names_of", "place",
    "prepare", "report", "source_of", "target", "why_not",
]  # fmt: skip
SHOWN = 6  # most names in the line that says what is compiled

_lock = threading.Lock()
_loaded: dict[tuple[str, str], ctypes.CDLL] = {}
_failed: dict[tuple[str, str], str] = {}


def library(name: str, device: Device) -> ctypes.CDLL:
    """Load the library `name` for `device`, building it if needed; once per process.

    Raises LibraryError, with what to do, where there is no compiler, the compiler fails (with its last lines), or a
    prebuilt library does not match; CacheError where the cache folder is not private. A failure is remembered and not
    retried.
    """
    made = target(name, device)
    at = (name, made.arch)
    with _lock:
        if at in _loaded:
            return _loaded[at]
        if at in _failed:
            raise LibraryError(_failed[at])
        try:
            _loaded[at] = _loaded_from(locate(name, made), name, made)
        except KernelError as error:
            _failed[at] = str(error)
            raise LibraryError(_failed[at]) from error
        return _loaded[at]


def _loaded_from(folder: Path, name: str, made: Target) -> ctypes.CDLL:
    """The library in a folder that `locate` found; where the system does not load it, the one that is built in its
    place: it was made for another C library, say, or cut short since its digest was taken."""
    try:
        return shared_library(folder / LIBRARY)
    except OSError as error:
        why = f"the kernel library {folder / LIBRARY} does not load ({error})"
    if os.environ.get(prebuilt.VARIABLE):
        raise LibraryError(f"{why}: build it on a machine of this kind, or unset {prebuilt.VARIABLE}")
    if folder == prebuilt.shipped(name, made):
        prebuilt.refuse(folder, "does not load on this system")
    else:
        cache.remove(KIND, folder.name)
    _say(f"{why}: it is built anew")
    folder = locate(name, made)
    try:
        return shared_library(folder / LIBRARY)
    except OSError as error:
        raise LibraryError(
            f"the kernel library {folder / LIBRARY} does not load, also when it was built again ({error}): run"
            " `accelpatch cache clear`, or set ACCELPATCH_CACHE to a folder from which programs may be run"
        ) from error


def prepare(names: Sequence[str], device: Device, why: str = "") -> None:
    """Load libraries that will be used; those that are missing are compiled first, all sources side by side.

    why: what needs them, for the line on stderr. Raises as `library` does, before anything is loaded.
    """
    new = [name for name in names if (name, target(name, device).arch) not in _loaded]
    if new and not os.environ.get(prebuilt.VARIABLE):
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
            return prebuilt.shipped(*one) or built(*one)
        except KernelError as error:
            return error

    wanted = [(name, target(name, device)) for name in names]
    with _announced(wanted, why), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(folder, wanted))


@contextmanager
def _announced(wanted: Sequence[tuple[str, Target]], why: str = "") -> Iterator[None]:
    """Says on stderr which libraries are compiled, and how long it took; nothing where all are there."""
    missed = [(name, made) for name, made in wanted if missing(made) is None and not prebuilt.shipped(name, made)]
    keys = {name: key(name, made, str(compiler(made))) for name, made in missed}
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
    if os.environ.get(prebuilt.VARIABLE):
        return prebuilt.why_not(name, made)
    if prebuilt.shipped(name, made):
        return None
    if device.kind == "cuda" and device.index is None:
        return None  # a plan for another machine, whose compiler is not known here
    reason = missing(made)
    return reason and prebuilt.lost(name, made) + reason


def source_of(name: str, device: Device) -> str:
    """Where `library` takes a library from, or why it cannot, in words; builds and loads nothing."""
    made = target(name, device)
    if reason := why_not(name, device):
        return f"none: {reason}"
    if named := os.environ.get(prebuilt.VARIABLE):
        return f"prebuilt, {place(named, name, made)}"
    if folder := prebuilt.shipped(name, made):
        return f"came with accelpatch, {folder}"
    path = str(compiler(made))
    folder = cache.entry(KIND, key(name, made, path))
    lost = prebuilt.lost(name, made)
    return lost + (f"compiled here, {folder}" if folder else f"compiled with {path} when first used")


def forget() -> None:
    """Forget remembered failures, so that builds are tried again."""
    with _lock:
        _failed.clear()


def locate(name: str, made: Target) -> Path:
    """The folder of a library that matches its manifest: prebuilt, cached, or built now."""
    if found := prebuilt.find(name, made):
        return found
    with _announced([(name, made)]):
        return built(name, made)


def built(name: str, made: Target) -> Path:
    """The cached folder of a library; compiles it where there is none that matches its manifest."""
    if reason := missing(made):
        raise LibraryError(prebuilt.lost(name, made) + reason)
    path = str(compiler(made))

    def write(finished: Path) -> None:
        try:
            compile_and_link(made, path, finished)
        except KernelError as error:
            raise LibraryError(f"the kernel library {name} for {made.arch} was not built: {error}") from error

    return entries.finished(key(name, made, path), LIBRARY, digest(made), identity(path), write).parent


def fingerprint(name: str, device: Device) -> str:
    """SHA-256 of the library `name` for `device`, building it if needed; why there is none, where there is none."""
    try:
        return entries.sha256(locate(name, target(name, device)) / LIBRARY)
    except KernelError as error:
        return str(error)


def export(name: str, device: Device, folder: Path) -> Path:
    """Build the library `name` into `folder`, for machines whose ACCELPATCH_KERNELS names it; returns its subfolder.

    Nobody else may write to it, whatever the umask is: it would be refused.
    """
    made = target(name, device)
    finished, into = prebuilt.shipped(name, made) or built(name, made), place(folder, name, made)
    try:
        Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
        into.mkdir(exist_ok=True)
        for file in (LIBRARY, MANIFEST):
            shutil.copyfile(finished / file, into / file)
            (into / file).chmod(0o644)
        into.chmod(0o755)
    except OSError as error:
        raise KernelError(f"{into} cannot be written ({error.strerror}); choose another folder") from None
    return into


def report(targets: Sequence[Target]) -> list[list[dict[str, Any]]]:
    """Registers, spills, shared memory and occupancy of each kernel of GPU libraries; compiles their sources again."""

    def of_one(made: Target) -> list[dict[str, Any]]:
        return [{**asdict(used), "waves": occupancy.waves(made.arch, used)} for used in resources.of_target(made)]

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(of_one, targets))


def key(name: str, made: Target, path: str) -> str:
    """The name of the cache entry."""
    include = ck_libraries.version(made.include) if made.include else ""
    whole = hashlib.sha256(f"{digest(made)}\n{identity(path)}{include}".encode()).hexdigest()
    return f"{name}-{made.arch}-{whole[:24]}"


def compile_into(folder: Path, made: Target, path: str) -> None:
    """Compile and link; writes the library and its manifest into `folder`."""
    compile_and_link(made, path, folder / LIBRARY)
    entries.describe(folder, LIBRARY, digest(made), identity(path))
