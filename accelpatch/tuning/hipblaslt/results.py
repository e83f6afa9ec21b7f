"""The reference compared with the tuned: what is right and faster, the tables of it, and how much the whole workload
gains."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelpatch.errors import AccelpatchError

from . import bench_output, logic, platforms, workload
from .gemms import Gemm
from .work import Work

RUNS = ("reference", "tuned", "verify")
COLUMNS = (
    "name", "transA", "transB", "batch_count", "m", "n", "k", "a_type", "d_type", "compute_type", "calls",
    "us_reference", "us_tuned", "ratio", "error_tuned", "kernel_reference", "kernel_tuned", "winner", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A GEMM with both libraries. library: the file that serves it, without its ending. error: of the tuned one's
    results, relative. winner: "tuned" or "reference", and `reason` says why it is the reference."""

    row: workload.Row
    library: str
    reference: bench_output.Ran
    tuned: bench_output.Ran
    error: float
    winner: str = ""
    reason: str = ""

    @property
    def ratio(self) -> float:
        """How many times as fast the tuned one is."""
        return self.reference.microseconds / self.tuned.microseconds


@dataclass(frozen=True)
class Summary:
    """All GEMMs that were compared. mean: of the ratios of those that are kept, less 1; None where none is. weighted:
    the time of all calls of all compared GEMMs with the reference, over that with what is kept, less 1."""

    compared: Sequence[Compared]
    mean: float | None
    weighted: float

    @property
    def kept(self) -> list[Compared]:
        """Those in which the tuned one wins."""
        return [one for one in self.compared if one.winner == "tuned"]


def serves(file: Path, gemm: Gemm) -> bool:
    """Whether a library's problem type is that of a GEMM."""
    problem = logic.read(file).part(logic.PROBLEM)
    flags = bool(problem.get("TransposeA")), bool(problem.get("TransposeB"))
    symbols = problem.get("DataType"), problem.get("DestDataType")
    same = flags == (gemm.trans_a == "T", gemm.trans_b == "T")
    wanted = gemm.data_symbol, bench_symbol(gemm)
    return same and all(_is(found, one) for found, one in zip(symbols, wanted, strict=True))


def bench_symbol(gemm: Gemm) -> str:
    """TensileLite's symbol of the type of D."""
    from .gemms import TYPES

    return TYPES[gemm.d_type].symbol


#: TensileLite's numbers of data types, which library logic has in the place of symbols; source: its DataType table
NUMBERS = {"S": 0, "D": 1, "H": 4, "I": 6, "B": 7, "I8": 8, "X": 10, "F8": 11, "B8": 12, "F8B8": 13, "B8F8": 14,
           "F8N": 15, "B8N": 16, "F8B8N": 17, "B8F8N": 18}  # fmt: skip


def _is(found: object, symbol: str) -> bool:
    if isinstance(found, int) and not isinstance(found, bool):
        return found == NUMBERS.get(symbol)
    return str(found).upper() == symbol


def is_complete(out: Path, rows: Sequence[workload.Row]) -> bool:
    """Whether a benchmark's file holds each of these GEMMs."""
    try:
        found = {one.key for one in bench_output.read(out)}
    except AccelpatchError:
        return False
    return {bench_output.key_of(row.gemm) for row in rows} <= found


def compare(work: Work) -> list[Compared]:
    """What the benchmark found, a GEMM at a time. Raises AccelpatchError where it was not run, or not to its end."""
    rows = [row for row in workload.read(work.summary) if row.name]
    found = []
    for file in sorted((work.folder / "libs").glob("*.yaml")):
        served = {size for size, _, _ in logic.read(file).sizes()}
        mine = [row for row in rows if platforms.size_of(row.gemm) in served and serves(file, row.gemm)]
        reference, tuned, checked = (
            {one.key: one for one in bench_output.read(work.folder / "benchmarks" / f"{file.stem}-{which}.out")}
            for which in RUNS
        )
        for row in mine:
            key = bench_output.key_of(row.gemm)
            lacking = [which for which, ran in zip(RUNS, (reference, tuned, checked), strict=True) if key not in ran]
            if lacking:
                raise AccelpatchError(f"the benchmark has no {lacking[0]} run of {row.name}: {AGAIN} {work.folder}")
            error = checked[key].error
            found.append(
                Compared(row, file.stem, reference[key], tuned[key], bench_output.FAILED if error is None else error)
            )
    if not found:
        raise AccelpatchError(f"{work.folder} has no benchmark: {AGAIN} {work.folder}")
    return found


AGAIN = "run `accelpatch tune hipblaslt benchmark`"


def summarise(compared: Sequence[Compared], *, error: float, uplift: float) -> Summary:
    """Which library wins each GEMM. error: the largest of a right result. uplift: the least ratio of a better one."""
    judged = [replace(one, winner="reference" if (why := _why_not(one, error, uplift)) else "tuned", reason=why)
              for one in compared]  # fmt: skip
    kept = [one.ratio for one in judged if one.winner == "tuned"]
    before = sum(one.row.calls * one.reference.microseconds for one in judged)
    after = sum(one.row.calls * (one.tuned if one.winner == "tuned" else one.reference).microseconds for one in judged)
    return Summary(judged, sum(kept) / len(kept) - 1 if kept else None, before / after - 1)


def _why_not(one: Compared, error: float, uplift: float) -> str:
    if not one.error <= error:
        return "wrong: the check failed" if one.error == bench_output.FAILED else f"wrong: its error is {one.error:.3g}"
    if one.reference.kernel and one.reference.kernel == one.tuned.kernel:
        return "the same kernel"
    return "" if one.ratio >= uplift else f"not better: {one.ratio:.3f} times as fast"


def text(compared: Sequence[Compared]) -> str:
    """The comparison as a table."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for one in compared:
        gemm = one.row.gemm
        table.writerow((
            one.row.name, gemm.trans_a, gemm.trans_b, gemm.batch, gemm.m, gemm.n, gemm.k, gemm.a_type, gemm.d_type,
            gemm.compute_type, one.row.calls, f"{one.reference.microseconds:.6g}", f"{one.tuned.microseconds:.6g}",
            f"{one.ratio:.4f}", f"{one.error:.3g}", one.reference.kernel, one.tuned.kernel, one.winner, one.reason,
        ))  # fmt: skip
    return out.getvalue()
