"""Python programs as forks of a process that has imported torch, transformers and accelpatch: four seconds less each.

`run` is what `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)` is, sooner. Programs that
need a terminal, a signal or an interpreter of their own are started by subprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])
#: variables that libraries read while they are imported: a program with others of them gets a process of its own
AT_IMPORT = ("PYTHON", "HF_", "TRANSFORMERS_", "TORCH", "OMP_", "MKL_", "CUDA_", "TRITON_", "LD_")
LONGEST = 1 << 17  # bytes of a request


def _at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_IMPORT)}


class _Server:
    """The process that forks, one program at a time. env: its environment, of which AT_IMPORT counts."""

    def __init__(self, env: Mapping[str, str]):
        self.env = _at_import(env)
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())], env=dict(env), pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def status(self, request: dict[str, Any], files: Sequence[int], timeout: float) -> int:
        """The exit status of a program. Raises TimeoutError, and ends what has not ended."""
        self._channel.settimeout(timeout)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            return int(self._channel.recv(64))
        except TimeoutError:
            self.end()
            raise

    def end(self) -> None:
        self._channel.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_servers: list[_Server] = []


@atexit.register
def _end() -> None:
    while _servers:
        _servers.pop().end()


def run(
    arguments: Sequence[str], *, cwd: Any = None, env: Mapping[str, str] | None = None, input: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """What `python *arguments` printed, and its status. Raises subprocess.TimeoutExpired, as subprocess.run does.

    arguments: a script, `-m` and a module, or `-c` and a program, with what follows. env: this process's where it is
    left out, with this checkout importable from any folder.
    """
    env = dict(os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"} if env is None else env)
    command = [sys.executable, *arguments]
    if not _servers:
        _servers.append(_Server(env))
    if _servers[0].env != _at_import(env):
        return subprocess.run(
            command, cwd=cwd, env=env, input=input, timeout=timeout, capture_output=True, text=True, check=False
        )
    request = {"arguments": list(arguments), "cwd": str(cwd or os.getcwd()), "env": env}
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(input)
        given.seek(0)
        try:
            status = _servers[0].status(request, [file.fileno() for file in (given, out, err)], timeout)
        except TimeoutError:
            _servers.clear()
            raise subprocess.TimeoutExpired(command, timeout) from None
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), err.read())


def _requested(channel: socket.socket) -> dict[str, Any]:
    """Of a program, in the fork that is to run it; the process that forks returns from here when no more come."""
    while True:
        text, files, _, _ = socket.recv_fds(channel, LONGEST, 3)
        if not text:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            found: dict[str, Any] = json.loads(text)
            return found
        for file in files:
            os.close(file)
        channel.send(str(os.waitstatus_to_exitcode(os.wait()[1])).encode())


def _program(request: dict[str, Any]) -> None:
    """Run it as Python does, up to its last line."""
    import numpy as np

    np.random.seed()  # as each process begins with another
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    first, *words = request["arguments"]
    if first == "-m":
        sys.path[0], sys.argv = os.getcwd(), [words[0], *words[1:]]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[1:]]
        del sys.modules["__main__"].__dict__["run"]
        exec(compile(words[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), [first, *words]
        runpy.run_path(first, run_name="__main__")


def _status(request: dict[str, Any]) -> int:
    """Run it as Python does, to its exit status; the interpreter is not taken down, which takes seconds in a fork."""
    status = 0
    try:
        _program(request)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  printed, as the interpreter does
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed
            stream.flush()
    return status


if __name__ == "__main__":
    atexit.unregister(_end)
    sys.path.pop(0)  # this folder, whose modules may have names of packages
    with socket.socket(fileno=int(sys.argv[1])) as served:
        import torch  # noqa: F401
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

        import accelpatch.api
        import accelpatch.cli.app  # noqa: F401

        asked = _requested(served)
    os._exit(_status(asked))
