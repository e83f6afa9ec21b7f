"""What hipblaslt-bench reads and prints.

Source of both forms: ROCm/rocm-libraries, projects/hipblaslt/clients/bench/README.md. Columns differ from release to
release (norm_error only with -v, frequencies on request), so they are found by their names.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

from .gemms import Gemm, least_leading

HEAD = (
    "transA", "transB", "grouped_gemm", "batch_count", "m", "n", "k", "alpha", "lda", "stride_a", "beta", "ldb",
    "stride_b", "ldc", "stride_c", "ldd", "stride_d", "a_type", "b_type", "c_type", "d_type", "compute_type", "scaleA",
    "scaleB", "scaleC", "scaleD", "amaxD", "activation_type", "bias_vector", "bias_type", "rotating_buffer",
)  # fmt: skip
NEEDED = ("transA", "transB", "batch_count", "m", "n", "k", "us")
CHECKED = ("norm_error", "atol", "rtol")
KERNEL = re.compile(r"--kernel name:\s*(\S.*)")
FAILED = math.inf  # the error of a check that failed without a figure
Key = tuple[str, str, int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Row:
    """One GEMM that was run. error: relative, of the check against a CPU, None where it was not made."""

    gemm: Gemm
    microseconds: float
    kernel: str
    error: float | None = None


@dataclass(frozen=True)
class Ran:
    """A row of a file. error: as of Row; `FAILED` where the tool says that the check failed."""

    key: Key
    microseconds: float
    kernel: str
    error: float | None


def key_of(gemm: Gemm) -> Key:
    """What a row is found by, within one problem type."""
    a, b, c, _ = gemm.leading
    return gemm.trans_a, gemm.trans_b, gemm.batch, gemm.m, gemm.n, gemm.k, a, b, c


def entries(gemms: Sequence[Gemm], *, iterations: Sequence[int], verify: bool = False) -> list[dict[str, Any]]:
    """The input of hipblaslt-bench --yaml. iterations: timed calls of each, and as many before them."""
    return [
        {
            "function": "matmul", "M": one.m, "N": one.n, "K": one.k, "lda": one.leading[0], "ldb": one.leading[1],
            "ldc": one.leading[2], "ldd": one.leading[3],
            **dict(zip(("stride_a", "stride_b", "stride_c", "stride_d"), one.strides(), strict=True)),
            "alpha": 1.0, "beta": 0.0, "transA": one.trans_a, "transB": one.trans_b, "batch_count": one.batch,
            "a_type": one.a_type, "b_type": one.b_type, "c_type": one.c_type, "d_type": one.d_type,
            "scale_type": one.compute_type.removeprefix("x"), "compute_type": f"c_{one.compute_type}",
            "initialization": "trig_float", "rotating": 512, "use_gpu_timer": True, "print_kernel_info": True,
            "iters": 1 if verify else count, "cold_iters": 0 if verify else count,
            **({"norm_check": 1, "norm_check_assert": 0, "allclose_check": 1} if verify else {}),
        }
        for one, count in zip(gemms, iterations, strict=True)
    ]  # fmt: skip


def entries_text(found: Sequence[dict[str, Any]]) -> str:
    """The input of hipblaslt-bench as YAML, an entry a line."""
    return "".join(f"- {json.dumps(one)}\n" for one in found)


def text(rows: Sequence[Row]) -> str:
    """Rows as hipblaslt-bench prints them, for platforms that stand in its place."""
    lines = []
    for place, row in enumerate(rows):
        gemm = row.gemm
        (lda, ldb, ldc, ldd), (sa, sb, sc, sd) = gemm.leading, gemm.strides()
        values = [
            gemm.trans_a, gemm.trans_b, 0, gemm.batch, gemm.m, gemm.n, gemm.k, 1, lda, sa, 0, ldb, sb, ldc, sc, ldd, sd,
            gemm.a_type, gemm.b_type, gemm.c_type, gemm.d_type, gemm.compute_type, 0, 0, 0, 0, 0, "none", 0,
            gemm.d_type, 0, f"{gemm.flops / row.microseconds / 1e3:.6g}", 0, f"{row.microseconds:.6g}",
        ]  # fmt: skip
        head = [*HEAD, "hipblaslt-Gflops", "hipblaslt-GB/s", "us"]
        if row.error is not None:
            head += ["CPU-Gflops", "CPU-us", *CHECKED]
            values += [0, 0, f"{row.error * gemm.batch:.6g}", "1e-05", "1e-05"]
        lines += [
            f"[{place}]:{','.join(head)}",
            "    " + ",".join(map(str, values)),
            f"    --kernel name:    {row.kernel}",
        ]
    return "\n".join(lines) + "\n"


def read(file: Path) -> list[Ran]:
    """The rows that hipblaslt-bench printed. Raises AccelpatchError where it printed none, or of another form."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise AccelpatchError(f"{file} cannot be read ({error.strerror})") from None
    found: list[Ran] = []
    for place, line in enumerate(lines):
        head = line.partition("]:")[2]
        if not re.match(r"\s*\[\d+\]:", line) or "transA" not in head or place + 1 >= len(lines):
            continue
        after = lines[place + 1 : next((at for at in range(place + 1, len(lines)) if "]:" in lines[at]), len(lines))]
        found.append(_ran(file, head, after))
    if not found:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise AccelpatchError(f"{file} holds no result of hipblaslt-bench; its last line: {last[:120]!a}")
    return found


def _ran(file: Path, head: str, after: Sequence[str]) -> Ran:
    names = [name.strip() for name in head.split(",")]
    lacking = [name for name in NEEDED if name not in names]
    if lacking:
        raise AccelpatchError(f"{file} is of a release of hipblaslt-bench without the column {', '.join(lacking)}")
    if not after:
        raise AccelpatchError(f"{file} is cut off after the head of a result")
    line = re.sub(r"\(([^()]*)\)", lambda one: f"({one[1].replace(',', ' ')})", after[0].strip())  # complex numbers
    (values,) = csv.reader([line])
    row = dict(zip(names, (value.strip() for value in values), strict=False))
    try:
        m, n, k, batch = (int(row[name]) for name in ("m", "n", "k", "batch_count"))
        dense = least_leading(row["transA"], row["transB"], m, n, k)
        a, b, c = (int(row.get(f"ld{one}", default)) for one, default in zip("abc", dense, strict=False))
        microseconds = float(row["us"])
    except (KeyError, ValueError):
        raise AccelpatchError(f"{file}: the row {line[:80]!a} is cut off, or no result") from None
    if not 0 < microseconds < math.inf:
        raise AccelpatchError(f"{file}: {row['us'][:20]!a} microseconds are no time")
    kernel = next((match[1].strip() for one in after if (match := KERNEL.search(one))), row.get("kernel_name", ""))
    return Ran((row["transA"], row["transB"], batch, m, n, k, a, b, c), microseconds, kernel, _error(row, batch))


def _error(row: dict[str, str], batch: int) -> float | None:
    """Of one matrix: the tool adds up those of a batch."""
    if "norm_error" not in row:
        return None
    if "failed" in (row.get("atol"), row.get("rtol")):
        return FAILED
    try:
        found = float(row["norm_error"])
    except ValueError:
        return FAILED
    return FAILED if math.isnan(found) else found / max(1, batch)
