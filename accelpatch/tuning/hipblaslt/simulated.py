"""A simulated device: a cost model of a GEMM on an AMD GPU, for machines without one. It is NO measurement.

The time of a call is the larger of two, and what is added to it:
- compute: work-groups run in rounds over the CUs; each does 2 * tile * K / splits flops, K rounded up to DepthU, at
  its CU's part of PEAK times an efficiency that falls with smaller tiles, one prefetch stage and a small DepthU;
- memory: tiles of A and B are read once a work-group, less what WorkGroupMapping keeps in the L2 cache, and D is
  written;
- added: LAUNCH, and a second kernel's time where K is split;
- a deviation of up to 2% that depends on problem and choice alone, for what such a model does not know.
A choice whose tiles do not fit into the LDS is refused, as TensileLite refuses it. One choice of WRONG gives wrong
results, which only the benchmark's check notices: so that the check has something to find.
"""

from __future__ import annotations

import hashlib
import math

from accelpatch.device import facts_of

from .configuration import macro_tile, target_of
from .gemms import TYPES, Gemm
from .space import Choice, key_of

NAME = "simulated"
PEAK = {"S": 160e12, "D": 160e12, "H": 1300e12, "B": 1300e12}  # flop/s of the card; others: 8-bit
PEAK_8_BIT = 2600e12
LAUNCH = 4e-6  # seconds
DEVIATION = 0.02
WRONG = 40  # one choice of so many
RIGHT_ERROR, WRONG_ERROR = 1e-3, 0.7  # what the check reports


def _hash(gemm: Gemm, choice: Choice, what: str) -> float:
    found = hashlib.sha256(f"{what} {gemm} {key_of(choice)}".encode()).digest()
    return int.from_bytes(found[:6], "big") / 2**48


def _integer(choice: Choice, name: str, default: int) -> int:
    value = choice.get(name, default)
    return int(value) if isinstance(value, bool | int | float) else default


def _tile(choice: Choice) -> tuple[int, int]:
    found = choice.get("MatrixInstruction")
    return macro_tile(found) if isinstance(found, tuple) and len(found) == 9 else (128, 128)


def why_not(gemm: Gemm, choice: Choice, arch: str) -> str | None:
    """Why a choice cannot run; None where it can."""
    (rows, columns), depth = _tile(choice), _integer(choice, "DepthU", 32)
    stages = 1 if _integer(choice, "1LDSBuffer", 0) else 2
    needed = int((rows + columns) * depth * TYPES[gemm.a_type].size * stages)
    facts = facts_of(arch)
    available = facts.block_shared if facts else 65536
    return f"its tiles need {needed} bytes of LDS, and there are {available}" if needed > available else None


def microseconds(gemm: Gemm, choice: Choice, arch: str) -> float:
    """The time that the cost model gives one call."""
    (rows, columns), depth = _tile(choice), _integer(choice, "DepthU", 32)
    splits, units = max(1, _integer(choice, "GlobalSplitU", 1)), target_of(arch).units
    groups = math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns) * gemm.batch * splits
    k = math.ceil(math.ceil(gemm.k / splits) / depth) * depth
    efficiency = min(1.0, (rows * columns / 32768) ** 0.35) * (
        1.0 if _integer(choice, "PrefetchGlobalRead", 2) > 1 else 0.85
    )
    efficiency *= 1 - 8 / (8 + depth * TYPES[gemm.a_type].size / 4) * 0.5
    efficiency *= 1.0 if _integer(choice, "SourceSwap", 1) else 0.97
    efficiency *= 0.96 if _integer(choice, "TransposeLDS", 1) == 0 and gemm.trans_a == "T" else 1.0
    peak = PEAK.get(gemm.data_symbol, PEAK_8_BIT) / units * efficiency
    compute = math.ceil(groups / units) * 2 * rows * columns * k / peak
    return (
        1e6
        * (max(compute, _memory(gemm, choice, arch, groups, k)) + _added(gemm, splits))
        * (1 + DEVIATION * (2 * _hash(gemm, choice, "time") - 1))
    )


def _memory(gemm: Gemm, choice: Choice, arch: str, groups: int, k: int) -> float:
    """Seconds of reading and writing."""
    (rows, columns), size = _tile(choice), TYPES[gemm.a_type].size
    facts, mapping = facts_of(arch), max(1, _integer(choice, "WorkGroupMapping", 1))
    reused = min(0.75, 0.25 * math.log2(2 * mapping) / 2) if gemm.n > columns else 0.0
    least = (gemm.m + gemm.n) * gemm.k * size * gemm.batch
    read = max(least, groups * (rows + columns) * k * size * (1 - reused) / 4)
    written = gemm.m * gemm.n * gemm.batch * TYPES[gemm.d_type].size
    stagger = 1.0 if _integer(choice, "StaggerU", 32) else 0.93
    return (read + written) / ((facts.bandwidth if facts else 1e12) * 0.8 * stagger)


def _added(gemm: Gemm, splits: int) -> float:
    if splits == 1:
        return LAUNCH
    return 2 * LAUNCH + 4 * gemm.m * gemm.n * gemm.batch * (splits + 1) / 3e12


def error(gemm: Gemm, choice: Choice) -> float:
    """The relative error that the check reports."""
    return WRONG_ERROR if _hash(gemm, choice, "wrong") < 1 / WRONG else RIGHT_ERROR


def reference(gemm: Gemm, arch: str) -> Choice:
    """The choice that stands for the library's own kernel: one tile for all problems, K split where they are few."""
    m, n, k, blocks = next(
        one for one in target_of(arch).instructions[gemm.data_symbol] if one[0] == 32 or one[0] == 16
    )
    groups = math.ceil(gemm.m / (8 * m)) * math.ceil(gemm.n / (8 * n))
    return {
        "MatrixInstruction": (m, n, k, blocks, 1, 4, 4, 2, 2), "DepthU": 32 if TYPES[gemm.a_type].size > 1 else 64,
        "PrefetchGlobalRead": 2, "1LDSBuffer": 1, "GlobalSplitU": 4 if groups < 64 and gemm.k >= 4096 else 1,
        "SourceSwap": 1, "WorkGroupMapping": 8, "StaggerU": 32, "TransposeLDS": 1,
    }  # fmt: skip
