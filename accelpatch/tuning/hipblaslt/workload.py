"""Which GEMMs of a log are worth tuning: each problem's share of all work, and summary.csv, which keeps it."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelpatch.errors import AccelpatchError

from .gemms import Gemm
from .gemms import why_not as why_no_gemm
from .logs import Found

COLUMNS = (
    "name", "transA", "transB", "batch_count", "m", "n", "k", "a_type", "b_type", "c_type", "d_type", "compute_type",
    "lda", "ldb", "ldc", "ldd", "calls", "flops", "share", "epilogues", "left_out",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A problem of a log. name: of its tuning configuration, empty where it has none. share: of the flops of all calls,
    in 0 to 1. epilogues: what came after the product. left_out: why it is not tuned."""

    name: str
    gemm: Gemm
    calls: int
    share: float
    epilogues: str = ""
    left_out: str = ""


def weigh(found: Found, threshold: float, why_not: Callable[[Gemm], str | None]) -> list[Row]:
    """The problems of a log, that with the largest share of all flops first. threshold: those with a smaller share, in
    percent, are not tuned. why_not: why a problem cannot be, None where it can."""
    total = sum(gemm.flops * calls for gemm, calls in found.calls.items())
    order = sorted(found.calls.items(), key=lambda item: (-item[0].flops * item[1], item[0].kind, str(item[0])))
    rows, places = [], Counter[str]()
    for gemm, calls in order:
        share = gemm.flops * calls / total
        left_out = why_not(gemm) or ""
        if not left_out and 100 * share < threshold:
            left_out = f"less than {threshold:g}% of all flops"
        name = "" if left_out else f"{gemm.kind}_{places[gemm.kind]}"
        places[gemm.kind] += not left_out
        epilogues = "; ".join(sorted(found.epilogues.get(gemm, ())))
        rows.append(Row(name, gemm, calls, share, epilogues, left_out))
    return rows


def text(rows: Sequence[Row]) -> str:
    """The rows as summary.csv."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in rows:
        gemm = row.gemm
        table.writerow((
            row.name, gemm.trans_a, gemm.trans_b, gemm.batch, gemm.m, gemm.n, gemm.k, gemm.a_type, gemm.b_type,
            gemm.c_type, gemm.d_type, gemm.compute_type, *gemm.leading, row.calls, gemm.flops, f"{row.share:.6g}",
            row.epilogues, row.left_out,
        ))  # fmt: skip
    return out.getvalue()


def read(file: Path) -> list[Row]:
    """The rows of summary.csv. Raises AccelpatchError for a file of another form or version."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            table = csv.DictReader(stream)
            lacking = [name for name in COLUMNS if name not in (table.fieldnames or ())]
            if lacking:
                raise ValueError(f"it has no column {', '.join(lacking)}")
            return [_row(one) for one in table]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, TypeError) as error:
        raise AccelpatchError(
            f"{file} is no summary of this version ({error}): `accelpatch tune hipblaslt configs LOG` writes it anew"
        ) from None


def _row(one: dict[str, str]) -> Row:
    m, n, k, batch = (int(one[name]) for name in ("m", "n", "k", "batch_count"))
    lda, ldb, ldc, ldd = (int(one[name]) for name in ("lda", "ldb", "ldc", "ldd"))
    a_type, b_type, c_type, d_type = (one[name] for name in ("a_type", "b_type", "c_type", "d_type"))
    gemm = Gemm(
        one["transA"],
        one["transB"],
        m,
        n,
        k,
        batch,
        a_type,
        b_type,
        c_type,
        d_type,
        one["compute_type"],
        (lda, ldb, ldc, ldd),
    )
    if reason := why_no_gemm(gemm):
        raise ValueError(reason)
    name = one["name"]
    if name and not (name.startswith(f"{gemm.kind}_") and name.removeprefix(f"{gemm.kind}_").isdecimal()):
        raise ValueError(f"{name[:40]!a} is no name of a {gemm.kind} problem")
    return Row(name, gemm, int(one["calls"]), float(one["share"]), one["epilogues"], one["left_out"])
