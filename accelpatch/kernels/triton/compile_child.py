"""The process in which Triton's kernels are compiled first; see compile_guard.py.

    python -m accelpatch.kernels.triton.compile_child

It reads Forms from its input and answers each with (exit code, what was printed), both pickled. Each is compiled in a
fork of this process, which has imported all that it takes, has no threads and has opened no GPU: a compiler that aborts
ends the fork. Triton's own cache then holds the code. Without a question for a while this process ends.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import sys
import tempfile
from importlib import import_module
from typing import Any, BinaryIO

import triton
from triton.compiler import ASTSource

from accelpatch.kernels.triton.compile_guard import Form

PATIENCE = 60  # seconds without a question


def answer(form: Form) -> tuple[int, str]:
    """The exit code of a compile, minus the number of a signal that ended it, and what was printed."""
    kernel = getattr(import_module(form.module), form.name)
    with tempfile.TemporaryFile() as printed:
        process = os.fork()
        if process == 0:
            _compile(kernel, form, printed.fileno())  # an exception ends the fork as it ends any program
            os._exit(0)
        _, status = os.waitpid(process, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read().decode(errors="replace")


def _compile(kernel: Any, form: Form, printed: int) -> None:
    for stream in (1, 2):
        os.dup2(printed, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = ASTSource(kernel, form.signature, form.constants, form.attrs)
    triton.compile(source, target=form.target, options=form.options)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more questions, or none for a while."""
    while select.select([questions], [], [], PATIENCE)[0]:
        try:
            form = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(answer(form), answers)
        answers.flush()


def main() -> None:
    """Serve by the streams that this process was given."""
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    serve(sys.stdin.buffer, kept)


if __name__ == "__main__":
    main()
