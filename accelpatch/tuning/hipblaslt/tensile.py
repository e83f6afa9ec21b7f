"""hipBLASLt's own tools: Tensile measures a choice, TensileCreateLibrary builds, hipblaslt-bench compares.

A thin adapter. Its tests run it with stand-in programs that read and write the documented forms; it was never run on a
machine with ROCm.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.children import why_ended

from . import bench_output, workload
from .configuration import Configuration, text, with_choice
from .gemms import TYPES, Gemm
from .search import Outcome, Trial
from .space import Choice, Space, to_fork
from .work import Work, write

LOGIC = "3_LibraryLogic"
BENCHES = ("build/release/clients/hipblaslt-bench", "build/release/clients/staging/hipblaslt-bench")
TENSILE, CREATE = "tensilelite/Tensile/bin/Tensile", "tensilelite/Tensile/bin/TensileCreateLibrary"
LIBRARY = "HIPBLASLT_TENSILE_LIBPATH"
FAILURES = 8  # choices that fail one after the other before a search is given up
TIMED = 0.2  # seconds that a GEMM is timed for in a benchmark
RATE, BANDWIDTH = 500e12, 4e12  # flop/s and bytes/s that the number of calls in that time is estimated by


class HipBlasLt:
    """A built checkout of hipBLASLt and one of its GPUs. Raises AccelpatchError where the checkout lacks a tool."""

    name = "hipblaslt"
    said = "hipBLASLt"

    def __init__(self, root: str, device: str):
        if not root:
            raise AccelpatchError("the hipblaslt platform needs --hipblaslt DIR, a built checkout of hipBLASLt")
        self._device, self._failures = device, 0
        self._tensile = _tool(Path(root), (TENSILE,))
        self._create = _tool(Path(root), (CREATE,))
        self._bench = _tool(Path(root), BENCHES)

    def measure(self, gemm: Gemm, choice: Choice, found: Configuration, folder: Path) -> Outcome:
        """The time that TensileLite's client gives the choice: it writes the kernel, compiles it and runs it.

        Raises AccelpatchError where FAILURES of them failed one after the other: the device or the tool is broken then.
        """
        outcome = self._run(choice, found, folder / "trial")
        self._failures = self._failures + 1 if outcome.failed else 0
        if self._failures == FAILURES:
            raise AccelpatchError(f"{FAILURES} choices failed one after the other, the last: {outcome.reason}")
        return outcome

    def reference(self, gemm: Gemm, found: Configuration) -> Choice | None:
        """None: which solution the library takes today is no choice of the configuration's parameters."""
        return None

    def keep(self, gemm: Gemm, best: Trial, found: Configuration, folder: Path) -> None:
        """Let TensileLite write the library logic of the best trial."""
        outcome = self._run(best.choice, found, folder / "best")
        files = sorted((folder / "best" / LOGIC).glob("*.yaml"))
        if outcome.microseconds is None or not files:
            raise AccelpatchError(f"Tensile wrote no library logic of the best trial ({outcome.reason or 'no file'})")
        shutil.rmtree(folder / LOGIC, ignore_errors=True)
        shutil.copytree(folder / "best" / LOGIC, folder / LOGIC)
        shutil.rmtree(folder / "trial", ignore_errors=True)

    def _run(self, choice: Choice, found: Configuration, folder: Path) -> Outcome:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        single = Space({name: (value,) for name, value in choice.items()})
        file = folder / "configuration.yaml"
        write(file, text(with_choice(found.document, to_fork(single))))
        # The device is the one that this process sees, which the configuration calls 0.
        if why := _call([self._tensile, file, folder], folder / "tensile.log"):
            return Outcome(None, f"Tensile: {why}", failed=True)
        return _winner(folder)

    def build(self, work: Work) -> None:
        """Build the merged library in a folder of its own; hipBLASLt's is left as it is."""
        target = work.folder / "tensile"
        shutil.rmtree(target, ignore_errors=True)
        arch = str(work.settings()["arch"])
        words = [self._create, "--code-object-version", "5", "--library-format", "msgpack", "--architecture", arch,
                 (work.folder / "libs").absolute(), target.absolute(), "HIP"]  # fmt: skip
        log = work.part("logs") / "TensileCreateLibrary.log"
        if why := _call(words, log):
            raise AccelpatchError(f"TensileCreateLibrary failed ({why}); {log} says more")
        if not (target / "library").is_dir():
            raise AccelpatchError(f"TensileCreateLibrary made no {target / 'library'}; {log} says more")

    def bench(self, work: Work, library: Path, rows: list[workload.Row], which: str, out: Path) -> None:
        """Run hipblaslt-bench on the GEMMs of a library, with hipBLASLt's own kernels or the tuned ones."""
        gemms = [row.gemm for row in rows]
        entries = bench_output.entries(gemms, iterations=[_calls(one) for one in gemms], verify=which == "verify")
        file = out.with_suffix(".yaml")
        write(file, bench_output.entries_text(entries))
        variables = {} if which == "reference" else {LIBRARY: str(_built(work.folder / "tensile" / "library"))}
        if why := _call([self._bench, "--yaml", file, "--device", self._device], out, variables):
            raise AccelpatchError(f"hipblaslt-bench failed ({why}); {out} says more")


def _tool(root: Path, names: Sequence[str]) -> str:
    """The path of a program of the checkout."""
    for name in names:
        if os.access(root / name, os.X_OK) and (root / name).is_file():
            return str(root / name)
    if elsewhere := shutil.which(Path(names[0]).name):  # newer releases install the Python programs
        return elsewhere
    raise AccelpatchError(
        f"{root} has no program {names[0]}: build hipBLASLt there with its clients, `./install.sh -dc -a ARCH`"
    )


def _call(words: Sequence[object], log: Path, variables: Mapping[str, str] | None = None) -> str:
    """Why a program did not end well; empty where it did. Its words go to it as they are, through no shell."""
    try:
        with log.open("wb") as out:
            ended = subprocess.run(
                [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **(variables or {})}, check=False,
            )  # fmt: skip
    except OSError as error:
        return f"it cannot be started: {error.strerror or error}"
    if not ended.returncode:
        return ""
    return why_ended(ended.returncode, log.read_text(encoding="utf-8", errors="replace")[-4096:])


def _winner(folder: Path) -> Outcome:
    """The time in the tables that Tensile's client wrote; CSVExportWinner names it in a column of its own."""
    times = []
    for file in sorted(folder.rglob("*.csv")):
        with file.open(encoding="utf-8", errors="replace", newline="") as stream:
            table = csv.DictReader(stream, skipinitialspace=True)
            if "WinnerTimeUS" not in (table.fieldnames or ()):
                continue
            for row in table:
                try:
                    times.append(float(row["WinnerTimeUS"]))
                except (TypeError, ValueError):
                    continue
    ran = [one for one in times if 0 < one < 1e12]
    return Outcome(min(ran)) if ran else Outcome(None, "Tensile rejected it, or its results were wrong")


def _calls(gemm: Gemm) -> int:
    """How many calls take about TIMED seconds."""
    values = gemm.m * gemm.k + gemm.n * gemm.k
    moved = gemm.batch * (values * TYPES[gemm.a_type].size + gemm.m * gemm.n * TYPES[gemm.d_type].size)
    return int(min(5000, max(10, TIMED / max(gemm.flops / RATE, moved / BANDWIDTH, 5e-6))))


def _built(library: Path) -> Path:
    """The folder of a built library's files; newer releases have one an arch in it."""
    return next(iter(sorted(library.glob("gfx*"))), library).absolute()
