"""Writes a folder all or nothing: readers see the old folder or the new one, whatever happens to the writer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelpatch.errors import SaveError

ASIDE = "-old"  # suffix of the name of a folder that is being replaced
_AT_FDCWD, _EXCHANGE = -100, 2  # of renameat2(2)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL)  # an old kernel, or a file system that cannot


@contextmanager
def replaced_folder(target: Path, kept: Callable[[str], bool]) -> Iterator[Path]:
    """Context manager: yields an empty folder that atomically replaces `target` at the end; after an error it does not.

    kept: whether a file of the old folder, by its name, goes into the new one, where that has none of this name. Raises
    SaveError where the folder cannot be written, or another process is writing it.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_dir():
        raise SaveError(f"{target} is a file: name a folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            made = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
            try:
                yield made
                _finish(made, target, kept)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        advice = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another folder"
        said = error.strerror or error
        raise SaveError(f"{target} cannot be written ({said}), and is as it was: {advice}") from error


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-"


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Context manager: no other process saves here meanwhile. Leftovers of a process that was killed are removed."""
    lock = target.parent / f".{target.name}.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(descriptor).st_ino == lock.stat().st_ino  # else its owner has just finished and removed it
        except OSError:
            mine = False
        if not mine:
            raise SaveError(f"another process is saving into {target}: wait for it, or name another folder")
        try:
            for left in sorted(target.parent.glob(f"{_prefix(target)}*")):
                if left.name.endswith(ASIDE) and not target.exists():
                    left.rename(target)  # a kill between two renames
                else:
                    shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _finish(made: Path, target: Path, kept: Callable[[str], bool]) -> None:
    made.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o777 & ~_umask())
    for old in target.iterdir() if target.exists() else ():
        if not (made / old.name).exists() and (old.is_dir() or kept(old.name)):
            if old.is_dir() and not old.is_symlink():
                shutil.copytree(old, made / old.name, symlinks=True, copy_function=_link)
            else:
                _link(str(old), str(made / old.name))
    _sync(made)
    if not target.exists():
        made.rename(target)
    elif not _exchanged(made, target):
        aside = made.with_name(made.name + ASIDE)
        target.rename(aside)  # only a kill at this point leaves no folder of this name; the next save puts it back
        made.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    _sync(target.parent)


def _link(old: str, new: str, *, follow_symlinks: bool = False) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(old, new, follow_symlinks=False)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
