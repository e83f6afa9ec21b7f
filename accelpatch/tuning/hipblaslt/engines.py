"""Other ways to tune hipBLASLt, of its own: what a shell needs to run them. Nothing here runs anything.

Sources, all in ROCm/rocm-libraries, projects/hipblaslt: docs/how-to/how-to-use-hipblaslt-offline-tuning.rst (tuning at
run time), utilities/geko/README.md, utilities/QuickTune/README.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelpatch.device import CDNA3
from accelpatch.errors import AccelpatchError

CACHE = "hipblaslt-tuning.txt"
#: variable -> (value, what it does), of tuning at run time
RUNTIME = {
    "HIPBLASLT_TUNING_CACHE_PATH": (CACHE, "the file of winners; unset HIPBLASLT_TUNING_OVERRIDE_FILE"),
    "HIPBLASLT_TUNING_MODE": ("tune", "times a shape's kernels at its first call; afterwards: cache"),
    "HIPBLASLT_TUNING_ALL_KERNELS": ("1", "0: the ranked ones alone, HIPBLASLT_TUNING_MAX_CANDIDATES of them"),
    "HIPBLASLT_TUNING_ROTATING_MB": ("512", "copies of the operands, so that none is in a cache when it is timed"),
    "HIPBLASLT_TUNING_BUDGET_MS_PER_SHAPE": ("0", "limit of one shape; 0: none"),
}
GEKO, QUICKTUNE = Path("utilities/geko/bin/geko"), Path("utilities/QuickTune/gemm_tuning.py")


@dataclass(frozen=True)
class Lines:
    """lines: for a shell. notes: what to know of them."""

    lines: list[str]
    notes: list[str]


def lines(engine: str, log: Path, hipblaslt: str, devices: Sequence[str], arch: str | None) -> Lines:
    """What a shell needs for an engine: "runtime", "geko" or "quicktune". Raises AccelpatchError without it."""
    if engine == "runtime":
        return _runtime()
    if not log.is_file():
        raise AccelpatchError(f"the log {log} is not here")
    tool = Path(hipblaslt or "/", GEKO if engine == "geko" else QUICKTUNE)
    if not hipblaslt or not tool.is_file():
        where = (
            f"{hipblaslt} has no {tool.relative_to(hipblaslt)}" if hipblaslt else "give its checkout with --hipblaslt"
        )
        raise AccelpatchError(f"{engine} comes with the sources of hipBLASLt: {where}")
    source = shlex.quote(str(log.absolute()))
    if engine == "geko":
        return _geko(shlex.quote(str(tool)), source, ",".join(devices), arch or CDNA3)
    command = f"python3 {shlex.quote(str(tool))} --input_file {source} --output_path quicktune --gpu_id {devices[0]}"
    return Lines(
        ["export HIPBLASLT_TUNING_FILE=quicktune/tuning.txt", f"{command} --requested_solution 128",
         "export HIPBLASLT_TUNING_OVERRIDE_FILE=quicktune/tuning.txt"],
        ["quicktune reads logs of HIPBLASLT_LOG_MASK=32; the last line is for the runs that shall use what it found"],
    )  # fmt: skip


def _runtime() -> Lines:
    made = [f"export {name}={value}  # {about}" for name, (value, about) in RUNTIME.items()]
    notes = [
        "run the program once with these: each shape's first call takes minutes; then set HIPBLASLT_TUNING_MODE=cache",
        "grouped GEMMs, and calls while a graph is captured, are not tuned: run the model once without graphs",
    ]
    return Lines(["unset HIPBLASLT_TUNING_OVERRIDE_FILE HIPBLASLT_TUNING_FILE", *made], notes)


def _geko(tool: str, source: str, devices: str, arch: str) -> Lines:
    common = f"--workload-log {source} --devices={devices} --workdir geko"
    return Lines(
        [f"{tool} --search {common}", f"{tool} --tune {common} --arch {shlex.quote(arch)}"],
        ["geko reads logs of HIPBLASLT_LOG_MASK=64; the first line (minutes) looks among the kernels that are there, "
         "the second (hours) makes new ones"],
    )  # fmt: skip
