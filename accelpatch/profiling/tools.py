"""Runs a program under rocprofv3, rocprof-compute or ncu, which record hardware counters, where they are.

The commands are those of the tools' manuals. AMD's tools were never run here. A program and its arguments are given to
a tool as a list: no shell reads them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelpatch.errors import AccelpatchError

#: old name -> what has taken its place
RENAMED = {
    "rocprof": "rocprofv3", "rocprofv2": "rocprofv3", "rocprofiler": "rocprofv3", "omniperf": "rocprof-compute",
    "omnitrace": "rocprof-sys", "nvprof": "ncu",
}  # fmt: skip
INSTALL = {
    "rocprofv3": "it comes with ROCm 6.2 and newer, in the package rocprofiler-sdk",
    "rocprof-compute": "it comes with ROCm 6.3 and newer, in the package rocprofiler-compute",
    "ncu": "it is Nsight Compute, which comes with the CUDA toolkit, in the package nsight-compute",
}
DEFAULTS = {
    "rocprofv3": ("SQ_WAVES", "SQ_INSTS_VALU", "SQ_INSTS_VMEM_RD", "SQ_INSTS_LDS", "SQ_WAIT_INST_LDS"),
    "rocprof-compute": (),
    "ncu": (
        "gpu__time_duration.sum", "dram__bytes_read.sum", "sm__warps_active.avg.pct_of_peak_sustained_active",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed", "launch__registers_per_thread", "launch__block_size",
    ),
}  # fmt: skip
#: what the tools say where the host keeps counters to itself
FORBIDDEN = (
    "ERR_NVGPUCTRPERM", "does not have permission to access NVIDIA GPU Performance Counters", "permission denied",
    "operation not permitted", "not permitted to", "counter collection is not supported",
    "HSA_STATUS_ERROR_OUT_OF_RESOURCES", "ROCPROFILER_STATUS_ERROR_NO_HARDWARE_COUNTERS",
)  # fmt: skip
HELP = {
    "ncu": "the administrator of the host can allow them (NVreg_RestrictProfilingToAdminUsers=0), not inside of most "
    "virtual machines; times need none: `accelpatch profile trace`",
    "rocprofv3": "virtual machines and containers without /dev/kfd's counters forbid them; times are recorded without",
    "rocprof-compute": "virtual machines forbid them; times need none: `accelpatch profile trace`",
}


@dataclass(frozen=True)
class Ran:
    """folder: where a tool's results are. said: of what could not be done, and what else was. forbidden: whether the
    host keeps counters to itself."""

    folder: Path
    said: tuple[str, ...] = ()
    forbidden: bool = False


def chosen(name: str) -> str:
    """The tool of a name, or for "auto" the first that is here.

    Raises AccelpatchError for an old name, with the new one, and where a tool is not here, with what to install.
    """
    if name in RENAMED:
        raise AccelpatchError(f"{name} has been replaced: use --tool {RENAMED[name]}")
    if name != "auto":
        if name not in INSTALL:
            raise AccelpatchError(f"{name!r} is no tool that is known here; there are: {', '.join(INSTALL)}")
        if shutil.which(name) is None:
            raise AccelpatchError(f"{name} is not on PATH: {INSTALL[name]}")
        return name
    found = next((one for one in ("rocprofv3", "ncu", "rocprof-compute") if shutil.which(one)), None)
    if found is None:
        ways = "; ".join(f"{one}: {way}" for one, way in INSTALL.items())
        raise AccelpatchError(
            f"no tool that records hardware counters is here. {ways}. Times need none: `accelpatch profile trace`"
        )
    return found


def command(tool: str, program: Sequence[str], folder: Path, counters: Sequence[str]) -> list[str]:
    """The arguments of a tool. counters: names of the tool's; () for none, but times."""
    if tool == "rocprofv3":
        asked = ["--pmc", *counters] if counters else []
        return [tool, "--kernel-trace", *asked, "--output-format", "csv", "-d", str(folder), "--", *program]
    if tool == "rocprof-compute":
        return [tool, "profile", "--no-roof", "--name", "accelpatch", "--path", str(folder), "--", *program]
    asked = ["--metrics", ",".join(counters)] if counters else ["--metrics", DEFAULTS["ncu"][0]]
    return [tool, "--csv", "--page", "raw", *asked, "--log-file", str(folder / "ncu.csv"), "--target-processes", "all",
            *program]  # fmt: skip


def run(
    tool: str, program: Sequence[str], folder: Path, counters: Sequence[str], note: Callable[[str], None]
) -> Ran:  # fmt: skip
    """Run a program under a tool. Where the host forbids counters it says so, and rocprofv3 records times without them.

    Raises AccelpatchError where the tool or the program fails for another reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note(f"running under {tool}: {program[0]}")
    status, said = _started(command(tool, program, folder, counters), note, folder)
    if not any(one.lower() in said.lower() for one in FORBIDDEN):
        if status:
            last = " / ".join(said.strip().splitlines()[-3:]) or "it said nothing"
            raise AccelpatchError(f"{tool} ended with status {status}: {last[-400:]}")
        return Ran(folder)
    words = f"this host forbids hardware counters: {HELP[tool]}"
    if tool == "rocprofv3":
        status, said = _started(command(tool, program, folder, ()), note, folder)
        if not status:
            return Ran(folder, (words,), True)
    return Ran(folder, (words,), True)


def _started(arguments: Sequence[str], note: Callable[[str], None], folder: Path) -> tuple[int, str]:
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise AccelpatchError(f"{arguments[0]} cannot be run: {error.strerror}") from error
    log = folder / "ncu.csv"
    logged = log.read_text(errors="replace")[:20_000] if log.is_file() else ""
    return done.returncode, f"{done.stdout[-20_000:]}\n{done.stderr[-20_000:]}\n{logged}"
