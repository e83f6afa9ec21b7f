"""What measures a choice and compares two libraries: hipBLASLt's own tools, Triton on a GPU, or a simulated device.

Every result of the simulated one says that it is simulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from accelpatch.errors import AccelpatchError

from . import simulated, workload
from .bench_output import Row, text
from .configuration import Configuration
from .gemms import Gemm
from .logic import as_text
from .logic import make as make_logic
from .search import Outcome, Trial
from .space import Choice
from .work import Work, write

NAMES = ("hipblaslt", "triton", "simulated")
LOGIC = "3_LibraryLogic"


class Platform(Protocol):
    """A way to run GEMMs. name: of NAMES. said: what every line about it begins with."""

    name: str
    said: str

    def measure(self, gemm: Gemm, choice: Choice, found: Configuration, folder: Path) -> Outcome:
        """The time of a choice."""
        ...

    def reference(self, gemm: Gemm, found: Configuration) -> Choice | None:
        """What is used today, where that is a choice of the same parameters."""
        ...

    def keep(self, gemm: Gemm, best: Trial, found: Configuration, folder: Path) -> None:
        """Write the library logic of the best trial into the folder's LOGIC."""
        ...

    def build(self, work: Work) -> None:
        """Make the merged library ready to be run."""
        ...

    def bench(self, work: Work, library: Path, rows: list[workload.Row], which: str, out: Path) -> None:
        """Run the GEMMs of a library, which: "reference", "tuned" or "verify" (tuned, and its results checked), and
        write what hipblaslt-bench prints."""
        ...


def make(name: str, *, device: str = "0", hipblaslt: str = "") -> Platform:
    """A platform on a device. Raises AccelpatchError where it is not here."""
    if name == "simulated":
        return Simulated()
    if name == "triton":
        from .triton_gemms import TritonGemms

        return TritonGemms(device)
    if name == "hipblaslt":
        from .tensile import HipBlasLt

        return HipBlasLt(hipblaslt, device)
    raise AccelpatchError(f"{name!r:.40} is no platform; use one of {', '.join(NAMES)}")


def gemm_of(work: Work, name: str) -> Gemm:
    """The GEMM of a configuration. Raises AccelpatchError where the summary has none of this name."""
    for row in workload.read(work.summary):
        if row.name == name:
            return row.gemm
    raise AccelpatchError(f"{work.summary} has no GEMM named {name[:40]!a}")


class Simulated:
    """The cost model of `simulated.py` for the arch of the configurations."""

    name = "simulated"
    said = "SIMULATED, no measurement"

    def measure(self, gemm: Gemm, choice: Choice, found: Configuration, folder: Path) -> Outcome:
        """What the cost model says."""
        reason = simulated.why_not(gemm, choice, found.arch)
        return Outcome(None, reason) if reason else Outcome(simulated.microseconds(gemm, choice, found.arch))

    def reference(self, gemm: Gemm, found: Configuration) -> Choice | None:
        """None: the cost model's own choice has parameters that the search may not set."""
        return None

    def keep(self, gemm: Gemm, best: Trial, found: Configuration, folder: Path) -> None:
        """Logic that names itself simulated, so that it is never taken for a library of hipBLASLt."""
        write_logic(gemm, best, found, folder, "simulated")

    def build(self, work: Work) -> None:
        """Nothing is to be built."""

    def bench(self, work: Work, library: Path, rows: list[workload.Row], which: str, out: Path) -> None:
        """The cost model's times, in the form that hipblaslt-bench prints."""
        made = []
        arch = str(work.settings()["arch"])
        solutions = choices_of(library)
        for row in rows:
            gemm = row.gemm
            choice = simulated.reference(gemm, arch) if which == "reference" else solutions[size_of(gemm)]
            error = simulated.error(gemm, choice) if which == "verify" else None
            name = "SIMULATED_library" if which == "reference" else f"SIMULATED_{row.name}"
            made.append(Row(gemm, simulated.microseconds(gemm, choice, arch), name, error))
        write(out, text(made))


def size_of(gemm: Gemm) -> tuple[int, ...]:
    """A GEMM's size in library logic."""
    return (gemm.m, gemm.n, gemm.batch, gemm.k)


def choices_of(library: Path) -> dict[tuple[int, ...], Choice]:
    """Size -> the choice of its solution, of a library that `write_logic` wrote."""
    from .logic import SOLUTIONS, read

    found = read(library)
    solutions = [
        {name: tuple(one) if isinstance(one, list) else one for name, one in solution.items() if name not in OWN}
        for solution in found.part(SOLUTIONS)
    ]
    return {size: solutions[place] for size, place, _ in found.sizes()}


OWN = ("SolutionIndex", "SolutionNameMin")


def write_logic(gemm: Gemm, best: Trial, found: Configuration, folder: Path, schedule: str) -> None:
    """Write the logic of a best trial that TensileLite did not write itself."""
    microseconds = best.outcome.microseconds or 1.0
    solution = {"SolutionNameMin": found.name} | {
        name: list(one) if isinstance(one, tuple) else one for name, one in best.choice.items()
    }
    made = make_logic(
        f"{schedule}_{gemm.kind}.yaml", schedule, found.arch, found.problem, solution, size_of(gemm),
        gemm.flops / microseconds / 1e3,
    )  # fmt: skip
    (folder / LOGIC).mkdir(exist_ok=True)
    write(folder / LOGIC / made.name, as_text(made))
