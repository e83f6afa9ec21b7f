"""Another program's script or module as ``__main__`` of this process, as python itself would start it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

from accelpatch.errors import AccelpatchError

# The files of the frames between this process's start and the script's first line.
STARTERS = (__file__, str(Path(__file__).with_name("exec.py")), runpy.__file__, "<frozen runpy>")


def run_file(script: str, arguments: list[str]) -> None:
    """``python script *arguments``: sys.argv, sys.path[0], ``__file__`` and ``__main__`` are what they would be there.

    ``__main__`` stays the script's after it ended, because threads, atexit functions and pickle still look there.
    """
    sys.argv[:] = [script, *arguments]
    _put_first_on_path(os.path.dirname(os.path.realpath(script)))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = SourceFileLoader("__main__", script)
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """``python -m name *arguments``. AccelpatchError where there is no such module."""
    _put_first_on_path(os.getcwd())
    if not _exists(name):
        raise AccelpatchError(f"no module named {name}; it is looked for in {os.getcwd()} and the environment")
    sys.argv[:] = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _put_first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:  # python -P: nothing was put there, and nothing must be
        sys.path[0] = folder


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


class FailuresAsPython:
    """A script's failure, shown as python shows it: by its excepthook, with the script's frames alone, status 1.

    sys.exit() of the script passes, and so do our own errors, which the command line shows in one line.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None or error is None or isinstance(error, SystemExit | AccelpatchError):
            return
        sys.excepthook(kind, error, own_traceback(error))
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def own_traceback(error: BaseException) -> types.TracebackType | None:
    """The part of ``error``'s traceback that begins in the script: without the frames that started it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in STARTERS:
        frame = frame.tb_next
    return frame
