"""Runs a user's script or module as ``__main__`` of this process, as python itself would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

from accelpatch.errors import AccelpatchError

# Files whose frames are below the first frame of the user's code in a traceback.
STARTERS = (
    *(str(Path(__file__).with_name(name)) for name in ("script.py", "exec.py", "options.py", "checks.py")),
    str(Path(__file__).parent.parent / "replacers" / "plugin.py"),
    runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>",
)  # fmt: skip


def run(words: list[str], *, as_module: bool) -> None:
    """Run the script or module ``words[0]`` with the arguments after it; an exception is printed, with status 1."""
    with FailuresAsPython():
        (run_module if as_module else run_file)(words[0], words[1:])


def run_file(script: str, arguments: list[str]) -> None:
    """Do what ``python script *arguments`` does, with the same sys.argv, sys.path[0], ``__file__`` and ``__main__``.

    ``__main__`` stays the script's after its end, because threads, atexit functions and pickle still look there.
    """
    sys.argv[:] = [script, *arguments]
    _put_first_on_path(os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Do what ``python -m name *arguments`` does. Raises AccelpatchError where there is no such module."""
    _put_first_on_path(os.getcwd())
    if not _exists(name):
        raise AccelpatchError(f"no module named {name}; it is looked for in {os.getcwd()} and the environment")
    sys.argv[:] = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _put_first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:  # with python -P the script's folder must not be on sys.path
        sys.path[0] = folder


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


class FailuresAsPython:
    """Context that shows exceptions of the user's code as python does: by sys.excepthook, without accelpatch's frames.

    It then exits with status 1. SystemExit and AccelpatchError pass through; the command line handles those.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None or error is None or isinstance(error, SystemExit | AccelpatchError):
            return
        error.__traceback__ = own_traceback(error)
        sys.excepthook(kind, error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def own_traceback(error: BaseException) -> types.TracebackType | None:
    """``error``'s traceback from the first frame of the user's code on, without the frames of STARTERS."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in STARTERS:
        frame = frame.tb_next
    return frame
