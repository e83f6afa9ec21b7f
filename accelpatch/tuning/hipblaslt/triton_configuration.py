"""Tuning configurations of accelpatch's own Triton GEMM, in the form of TensileLite's, for GPUs without hipBLASLt.

The parameters are those of `accelpatch/kernels/triton/gemm.py`: a program computes TOKENS columns and ROWS rows of D,
and takes COLUMNS of K at a time; K is divided into SPLITS.
"""

from __future__ import annotations

from typing import Any

from . import configuration
from .gemms import Gemm, least_leading
from .space import Space, Value, to_fork

LEAST_RUN = 512  # least length of a K split


def why_not(gemm: Gemm, arch: str) -> str | None:
    """Why a GEMM is none of the Triton kernel's; None where it is."""
    if (gemm.trans_a, gemm.trans_b) != ("T", "N"):
        return "the Triton GEMM takes A transposed and B as it is"
    if gemm.a_type not in ("bf16_r", "f16_r") or {gemm.b_type, gemm.c_type, gemm.d_type} != {gemm.a_type}:
        return "the Triton GEMM takes bf16 and f16 alone"
    if gemm.batch > 1 or gemm.leading != least_leading("T", "N", gemm.m, gemm.n, gemm.k):
        return "the Triton GEMM takes one product of matrices without gaps"
    return None


def space_of(gemm: Gemm) -> Space:
    """The parameters of the kernel and their values."""
    tokens = tuple(one for one in (16, 32, 64, 128) if one < 2 * max(16, gemm.n))
    splits = tuple(one for one in (1, 2, 4, 8) if one == 1 or gemm.k // one >= LEAST_RUN)
    values: dict[str, tuple[Value, ...]] = {
        "TOKENS": tokens, "ROWS": (32, 64, 128), "COLUMNS": (32, 64, 128), "WARPS": (4, 8), "STAGES": (2, 3, 4, 6),
        "SPLITS": splits,
    }  # fmt: skip
    return Space(values)


def document(gemm: Gemm, arch: str) -> dict[str, Any]:
    """The configuration of a GEMM."""
    size = [gemm.m, gemm.n, gemm.batch, gemm.k]
    group = {"ForkParameters": to_fork(space_of(gemm)),
             "BenchmarkFinalParameters": [{"ProblemSizes": [{"Exact": size}]}]}  # fmt: skip
    return {
        "GlobalParameters": {"Kernel": "accelpatch/kernels/triton/gemm.py"},
        "BenchmarkProblems": [[configuration.problem_type(gemm), group]],
        "LibraryLogic": {"ScheduleName": "triton", "DeviceNames": [], "ArchitectureName": arch},
    }
