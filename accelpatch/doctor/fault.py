"""Runs a program so that a memory fault of the GPU stops at its kernel, and names that kernel.

The program and its arguments are given to the system, or to a tool, as a list: no shell reads them. AMD's debug agent
was never run here; its options are those of its user guide.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelpatch import device
from accelpatch.errors import AccelpatchError

from . import fault_logs
from .fault_logs import Fault, clean

OUTPUT, AGENT, SANITIZER, CODE = "output.txt", "agent.txt", "sanitizer.txt", "code"  # in the folder of a run
AGENT_LIBRARY = "librocm-debug-agent.so.2"
LOGGED = 1 << 30  # bytes of a program's output that are kept
#: compute-sanitizer ends with status 0 also where a signal ended the program; these lines of its log say so
_FAILED, _UNSEEN = "process didn't terminate successfully", "terminated before first instrumented API call"
CODE_FILES = {".cubin", ".hsaco", ".co"}

#: for every vendor: Python says where it is stopped and loses nothing that it printed; code objects with source lines
EVERY = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "TRITON_DISABLE_LINE_INFO": "0"}
SERIAL = {
    "amd": {"AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3", "HIP_LAUNCH_BLOCKING": "1"},
    "nvidia": {"CUDA_LAUNCH_BLOCKING": "1"},
    "cpu": {},
}
#: caches that would let an access past the end of a tensor land in another one
UNCACHED = {
    "amd": {
        "PYTORCH_NO_HIP_MEMORY_CACHING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1",
    },
    "nvidia": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "cpu": {},
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What came of a run. status: the program's, negative for the number of a signal; None where it did not end in
    time. code: files of code objects that were collected. notes: what was not as asked."""

    faults: tuple[Fault, ...]
    status: int | None
    folder: Path
    variables: Mapping[str, str]
    tool: str | None
    code: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> bool:
        return bool(self.faults) or self.status != 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "faults": [one.to_dict() for one in self.faults], "status": self.status, "folder": str(self.folder),
            "variables": dict(self.variables), "tool": self.tool, "code": [str(one) for one in self.code],
            "notes": list(self.notes),
        }  # fmt: skip


def variables_for(vendor: str, folder: Path, *, caching: bool, agent: str | None) -> dict[str, str]:
    """The variables of a run. vendor: "amd", "nvidia" or "cpu". caching: keep torch's caches of memory, which captured
    graphs need. agent: the debug agent's library, None to go without it."""
    found = EVERY | SERIAL[vendor] | ({} if caching else UNCACHED[vendor])
    if vendor != "cpu":
        found["TRITON_CACHE_DIR"] = str(folder / CODE)  # so that every kernel is compiled anew, and kept
    if agent is not None:
        _check_agent_path(folder)
        found |= {
            "HSA_TOOLS_LIB": agent, "HSA_ENABLE_DEBUG": "1",
            "ROCM_DEBUG_AGENT_OPTIONS": f"--all --precise-memory --save-code-objects={folder / CODE} "
            f"--output={folder / AGENT}",
        }  # fmt: skip
    return found


def _check_agent_path(folder: Path) -> None:
    if re.search(r"[\s%]", str(folder)):
        raise AccelpatchError(
            f"the debug agent reads its options as words, and {clean(str(folder))} has a space or a %: name another "
            "folder by --out"
        )


def agent_library(variables: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """The path of ROCm's debug agent, of the newest ROCm that is here; None where there is none."""
    named = [Path(variables["ROCM_PATH"])] if variables.get("ROCM_PATH") else []
    places = [*named, root / "opt/rocm", *sorted(root.glob("opt/rocm-*"), reverse=True)]
    return next((str(file) for place in places if (file := place / "lib" / AGENT_LIBRARY).is_file()), None)


def sanitizer() -> str | None:
    """The path of compute-sanitizer: on PATH, in the CUDA toolkit, or of a Python package; None without one."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    places = [None, f"{home}/bin", f"{home}/compute-sanitizer", *device.packaged()]
    return next((path for place in places if (path := shutil.which("compute-sanitizer", path=place))), None)


def command(program: Sequence[str], folder: Path, tool: str | None) -> list[str]:
    """The arguments that start a program, under compute-sanitizer where `tool` is its path."""
    if tool is None:
        return list(program)
    return [
        tool, "--tool", "memcheck", "--force-blocking-launches", "--strip-paths", "no", "--require-cuda-init", "no",
        "--target-processes", "all", "--log-file", str(folder / SANITIZER), *program,
    ]  # fmt: skip


def run(
    program: Sequence[str], vendor: str, folder: Path, *, caching: bool = False, tools: bool = True,
    seconds: float | None = None, show: Callable[[str], None] = lambda text: None,
) -> Found:  # fmt: skip
    """Run a program and read which kernel faulted. folder: empty; what is recorded comes here. tools: use the debug
    agent or compute-sanitizer where they are. seconds: stop it then. show: gets what it prints.

    Raises AccelpatchError where the program cannot be started.
    """
    folder = Path(os.path.abspath(folder))
    (folder / CODE).mkdir(parents=True, exist_ok=True)
    agent = agent_library() if tools and vendor == "amd" else None
    checker = sanitizer() if tools and vendor == "nvidia" else None
    variables = variables_for(vendor, folder, caching=caching, agent=agent)
    status = _run(command(program, folder, checker), variables, folder / OUTPUT, seconds, show)
    notes = list[str]()
    if checker and status == 0 and _says(folder / SANITIZER, _FAILED, _UNSEEN):
        notes.append(f"{checker} could not start the program here, so it ran without it")
        status = _run(program, variables, folder / OUTPUT, seconds, show)
    elif checker and status == 0 and _says(folder / SANITIZER, _FAILED):
        notes.append("by compute-sanitizer the program failed; the status is the tool's own")
        status = 1
    if status is None:
        notes.append(f"stopped after {seconds:g} s; the faults are those until then")
    if tools and vendor == "amd" and agent is None:
        notes.append(f"{AGENT_LIBRARY} is not here (part of ROCm, package rocm-debug-agent): the launch alone is known")
    if tools and vendor == "nvidia" and checker is None:
        notes.append("compute-sanitizer is not here (pip install nvidia-cuda-sanitizer-api, or the CUDA toolkit)")
    faults = _read(folder)
    code = tuple(sorted(one for one in (folder / CODE).rglob("*") if _is_code(one)))
    faults = [_with_definition(one, folder / CODE) for one in faults]
    tool = checker or agent
    return Found(tuple(faults), status, folder, variables, tool, code, tuple(notes))


def _says(log: Path, *words: str) -> bool:
    """Whether compute-sanitizer's log has all of these words, among its first 64 KiB of text or its last."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return all(one in text[: 1 << 16] or one in text[-(1 << 16) :] for one in words)


def _is_code(file: Path) -> bool:
    return file.is_file() and (file.suffix in CODE_FILES or file.name.startswith(("file_", "memory_")))


def _read(folder: Path) -> list[Fault]:
    """The faults of a run's logs. The tools' come before what the program printed."""

    def texts() -> Any:
        for name in (AGENT, SANITIZER, OUTPUT):
            with contextlib.suppress(OSError), (folder / name).open(errors="replace") as stream:
                yield from fault_logs.lines(stream)

    return fault_logs.read(texts())


def _with_definition(fault: Fault, code: Path) -> Fault:
    """With the line where a Triton kernel is defined, from what Triton compiled, where the tool gave none."""
    if fault.source or not fault.kernel or not re.fullmatch(r"\w+", fault.kernel):
        return fault
    for file in sorted(code.rglob(f"{fault.kernel}.ttir")):
        with file.open(errors="replace") as stream:
            for line in fault_logs.lines(stream):
                if place := re.match(r'#loc\d* = loc\("(.+\.py)":(\d+):\d+\)', line):
                    return replace(fault, source=f"{clean(place[1])}:{place[2]} (where it is defined)")
    return fault


def _run(
    arguments: Sequence[str], variables: Mapping[str, str], log: Path, seconds: float | None,
    show: Callable[[str], None],
) -> int | None:  # fmt: skip
    """The status of a program, None where it was stopped. Its whole process group is, also where this one is."""
    try:
        process = subprocess.Popen(
            arguments, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise AccelpatchError(f"{clean(arguments[0])} cannot be run: {words}") from error
    copier = threading.Thread(target=_copy, args=(process, log, show), daemon=True)
    copier.start()
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is not None:
            copier.join(timeout=5)  # what it started may hold the pipe open
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        copier.join(timeout=5)
        process.wait()


def _copy(process: subprocess.Popen[str], log: Path, show: Callable[[str], None]) -> None:
    """Read what a program prints until its end: it would wait else. A full disk or a closed terminal loses the rest."""
    assert process.stdout is not None
    written = 0
    with contextlib.suppress(OSError), log.open("w", errors="replace") as file:
        while part := process.stdout.readline(1 << 16):
            with contextlib.suppress(OSError, ValueError):
                show(part)
            if written < LOGGED:
                with contextlib.suppress(OSError):
                    file.write(part)
                    file.flush()
                written += len(part)
