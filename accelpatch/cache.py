"""The user's cache folder: entries are published by one atomic rename, so many processes can share it.

An entry is a folder ``ROOT/KIND/KEY``. Names that begin with a dot are locks, or folders that are being written. The
root must be private to the user, because compiled kernels are loaded from it and run with the user's rights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelpatch.errors import CacheError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_PARTIAL = ".partial"  # .partial@HOST@PID@RANDOM: host and process of the writer, for _abandoned
_FOREIGN_PARTIAL_SECONDS = 24 * 3600
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OTHER_FOLDER = "set ACCELPATCH_CACHE to a folder of your own"


@dataclass(frozen=True)
class CacheEntry:
    """One complete entry; ``bytes`` is the sum of its files' sizes."""

    kind: str
    key: str
    bytes: int
    path: Path


def root() -> Path:
    """The cache folder: ``$ACCELPATCH_CACHE``, else ``$XDG_CACHE_HOME/accelpatch``, else ``~/.cache/accelpatch``.

    Created with mode 0700 when missing. Raises CacheError when it is a link, owned by another user, writable by
    others, or cannot be made.
    """
    named, shared = os.environ.get("ACCELPATCH_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if named:
        return _private(Path(named).expanduser().absolute())
    # The XDG specification says to ignore relative paths.
    base = Path(shared) if os.path.isabs(shared) else Path("~/.cache").expanduser()
    return _private(base / "accelpatch")


def entry(kind: str, key: str) -> Path | None:
    """The folder of an entry, or None where it does not exist."""
    path = root() / _checked(kind) / _checked(key)
    return path if path.is_dir() and not path.is_symlink() else None


def publish(kind: str, key: str, write: Callable[[Path], None]) -> Path:
    """The folder of an entry; ``write(folder)`` fills it where it does not exist yet.

    ``write`` gets a private temporary folder, which is then renamed. Of many processes one writes while the others
    wait; where file locks do not work, several write and the first to finish wins. Exceptions of ``write`` pass
    through, with nothing left behind. Raises CacheError where the disk is full or read-only.
    """
    if finished := entry(kind, key):
        return finished
    final = _private(root() / kind) / key
    try:
        with _locked(final.with_name(f".{key}.lock")):
            if finished := entry(kind, key):
                return finished
            _sweep(final.parent)
            with _partial(final.parent) as partial:
                write(partial)
                _sync(partial)
                _rename(partial, final)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        advice = f"run `accelpatch cache clear`, or {_OTHER_FOLDER}"
        raise CacheError(f"{final} cannot be written ({error.strerror}): {advice}") from error
    return final


def remove(kind: str, key: str) -> int:
    """Remove one entry, such as a damaged one; returns the bytes freed, 0 where it does not exist."""
    path = entry(kind, key)
    return 0 if path is None else _remove_entry(path)


def listing() -> list[CacheEntry]:
    """All complete entries, sorted by kind and key."""
    return [
        CacheEntry(kind.name, path.name, _size(path), path)
        for kind in _folders(root())
        for path in _folders(kind)
        if not path.name.startswith(".")
    ]


def clear(kind: str | None = None) -> int:
    """Remove all entries, or those of one kind, and the partial folders of dead processes; returns the bytes freed."""
    swept = sum(_sweep(folder) for folder in _folders(root()) if kind in (None, folder.name))
    return swept + sum(_remove_entry(one.path) for one in listing() if kind in (None, one.kind))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise CacheError(f"{name!r} cannot name a cache entry: use letters, digits and . _ + -")
    return name


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the cache folder {path} cannot be made ({error.strerror}): {_OTHER_FOLDER}") from error
    check_private(path, "the cache folder", _OTHER_FOLDER)
    return path


def check_private(path: Path, what: str, advice: str, owners: Sequence[int] = ()) -> None:
    """Raise CacheError where code must not be loaded from a folder or file: it is a link, another user's, or others may
    write to it. what, advice: for the message. owners: whose it may be; default: the user's own."""
    try:
        facts = path.lstat()
    except OSError as error:
        raise CacheError(f"{what} {path} cannot be read ({error.strerror}): {advice}") from error
    if stat.S_ISLNK(facts.st_mode):
        raise CacheError(f"{what} {path} is a link: {advice}")
    if facts.st_uid not in (owners or (os.geteuid(),)):
        raise CacheError(f"{what} {path} belongs to user {facts.st_uid}, not {os.geteuid()}: {advice}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"{what} {path} is writable by others: chmod go-w {path}, or {advice}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Some network file systems have no locks: then the rename alone decides which writer wins.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """Context manager: a new folder, locked while it is written, and removed at the end unless it was renamed."""
    path = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}@{socket.gethostname()}@{os.getpid()}@", dir=folder))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _rename(partial: Path, final: Path) -> None:
    try:
        os.rename(partial, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return  # another process was first, and its entry is as good
    _sync_path(final.parent)


def _sweep(folder: Path) -> int:
    """Remove the partial folders that killed processes left in ``folder``; returns the bytes freed."""
    freed = 0
    for path in _folders(folder):
        if path.name.startswith(_PARTIAL) and _abandoned(path):
            freed += _size(path)
            shutil.rmtree(path, ignore_errors=True)
    return freed


def _abandoned(path: Path) -> bool:
    """Whether no process writes this folder any more, by its lock and by the process table.

    Either alone can be wrong: some file systems have no locks (see _locked), and other hosts' processes are not seen.
    """
    _, host, process, _ = path.name.split("@", 3)
    try:
        if host == socket.gethostname():
            if _alive(int(process)):
                return False
        elif time.time() - path.stat().st_mtime < _FOREIGN_PARTIAL_SECONDS:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # another user's is alive too
    return True


def _remove_entry(path: Path) -> int:
    # Renamed first: an entry must never be seen half removed.
    with _partial(path.parent) as partial:
        try:
            os.rename(path, partial)
        except FileNotFoundError:
            return 0
        return _size(partial)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _size(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total


def _sync(folder: Path) -> None:
    for base, _, names in os.walk(folder):
        for name in names:
            _sync_path(Path(base, name))
        _sync_path(Path(base))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
