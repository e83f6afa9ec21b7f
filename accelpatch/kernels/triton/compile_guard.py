"""Kernels are compiled for AMD in a child process first: there are forms at which Triton's compiler aborts.

Triton calls a hook before it compiles a form of a kernel that this process has not had. The hook looks the form up in
the cache folder, by Triton's release, the arch and all that the code depends on, or has the child compile it. Where the
compiler ended the child, the launch raises CompileError, and dispatch takes another implementation. Where it did not,
Triton's own cache holds the code, and the compile that follows only reads it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch import cache
from accelpatch.errors import CacheError, CompileError

KIND, FILE = "triton", "reason"  # of the cache; an empty file: it compiles
CHILD = "accelpatch.kernels.triton.compile_child"
OURS = "accelpatch"  # the package whose kernels the hook looks at
CRASHES = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
FAILED = re.compile(r"Assertion|LLVM ERROR|UNREACHABLE")  # in the line that says what was wrong
LONGEST = 300  # characters of that line


@dataclass(frozen=True)
class Form:
    """A kernel and all that its code depends on, for another process. source: a hash of the kernel and what it calls.
    The others are those of Triton's ASTSource and `compile`."""

    module: str
    name: str
    source: str
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attrs: Any
    target: Any
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The name of its entry in the cache."""
        import triton
        from triton._C.libtriton import get_cache_invalidating_env_vars as variables

        parts = (triton.__version__, sorted(variables().items()), *vars(self).values())
        return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


class Compiler:
    """Compiles in a child process, which starts when it is first needed and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._none = False  # no child can be had here

    def compile(self, form: Form) -> tuple[int, str] | None:
        """(exit code, what was printed), as compile_child has it; None where no child can be had, or none can be given
        the form: of Triton 3.2."""
        try:
            question = pickle.dumps(form)
        except (pickle.PicklingError, TypeError, AttributeError):
            return None
        with self._lock:
            for _ in range(0 if self._none else 2):  # one that had long waited in vain may just have ended
                try:
                    return self._answer(question)
                except (OSError, EOFError):
                    self._end()
            self._none = True
            return None

    def _answer(self, question: bytes) -> tuple[int, str]:
        if self._process is None:
            self._process = _started()
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(question)
        questions.flush()
        return pickle.load(answers)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes its pipes and waits
                self._process = None


def _started() -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", CHILD], env=variables | {"PYTHONPATH": paths}, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


_compiler = Compiler()
_known: dict[str, str] = {}  # key of a Form -> why it cannot be compiled, "" where it can


def require(form: Form) -> None:
    """Raise CompileError where a form cannot be compiled."""
    if form.key not in _known:
        _known[form.key] = _looked_up(form)
    if reason := _known[form.key]:
        raise CompileError(reason)


def _looked_up(form: Form) -> str:
    """Why a form cannot be compiled, "" where it can; kept in the cache folder where that will not change."""
    try:
        folder = cache.entry(KIND, form.key)
        if folder is not None:
            return (folder / FILE).read_text()
    except (CacheError, OSError):  # no folder of the user's own, or a damaged entry
        pass
    answer = _compiler.compile(form)
    if answer is None:  # then it is compiled here, unguarded
        return ""
    code, printed = answer
    reason = reason_of(form, code, printed)
    if code == 0 or -code in CRASHES:
        with suppress(CacheError):
            cache.publish(KIND, form.key, lambda folder: _write(folder, reason))
    return reason


def _write(folder: Path, reason: str) -> None:
    (folder / FILE).write_text(reason)


def reason_of(form: Form, code: int, printed: str) -> str:
    """Why a form cannot be compiled, by the child's answer; "" where it can."""
    import triton

    if code == 0:
        return ""
    lines = [line for line in printed.splitlines() if line.strip()] or [f"exit code {code}"]
    line, ended = lines[-1], ""
    if code < 0:
        line = next((line for line in lines if FAILED.search(line)), line)
        ended = f"the compiler ended with {signal.Signals(-code).name}: "
    kernel = f"{form.module.rpartition('.')[2]}.{form.name}"
    return f"Triton {triton.__version__} cannot compile {kernel} for {form.target.arch}: {ended}{line[:LONGEST]}"


def form_of(kernel: Any, given: Mapping[str, Any]) -> Form:
    """The Form of a kernel that Triton is about to compile. given: what Triton hands to its hook."""
    from triton.runtime.driver import driver

    options = json.loads(given["specialization_data"])["options"]  # JSON has lists for tuples
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return Form(
        kernel.fn.__module__, kernel.fn.__name__, kernel.cache_key, given["signature"], given["constants"],
        given["configs"][0], driver.active.get_current_target(), tuples,
    )  # fmt: skip


class _Guard:
    """Context manager: Triton asks `require` before it compiles a kernel of ours. For many threads, and for nesting."""

    def __init__(self) -> None:
        self._lock, self._within = threading.Lock(), 0
        self._before: Callable[..., bool | None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                owner, name = _hook()
                self._before = getattr(owner, name)
                setattr(owner, name, self._ask)
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                setattr(*_hook(), self._before)

    def _ask(self, **given: Any) -> bool | None:
        """Triton's hook: whether it shall not compile."""
        kernel = given["fn"].jit_function
        if kernel.fn.__module__.partition(".")[0] == OURS:
            require(form_of(kernel, given["compile"]))
        return None if self._before is None else self._before(**given)


@functools.cache
def _hook() -> tuple[Any, str]:
    """Owner and name of the hook that Triton calls before a compile."""
    import triton

    knobs = getattr(triton, "knobs", None)  # since Triton 3.4
    return (triton.runtime.jit.JITFunction, "cache_hook") if knobs is None else (knobs.runtime, "jit_cache_hook")


_guard = _Guard()


@contextmanager
def guarded(place: AbstractContextManager[object]) -> Iterator[None]:
    """Context manager: `place`, and launches compile nothing that ends the process; they raise CompileError."""
    with place, _guard:
        yield
