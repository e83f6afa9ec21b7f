"""A GEMM as hipBLASLt sees it: column-major D[m, n] = A[m, k] B[k, n], each of A and B stored as it is or transposed.

A row-major `x[M, K] @ w[N, K].T` of torch is here A = w, transposed, and B = x: transA T, transB N, m = N, n = M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LARGEST = 1 << 31  # sizes and leading dimensions are 32-bit integers in hipBLASLt's solutions


@dataclass(frozen=True)
class Type:
    """A data type. symbol: TensileLite's. size: bytes of a value."""

    symbol: str
    size: float


#: hipBLASLt's names of data types; source: hipblaslt-bench --help, and TensileLite's DataType table
TYPES: Mapping[str, Type] = MappingProxyType({
    "f64_r": Type("D", 8), "f32_r": Type("S", 4), "xf32_r": Type("X", 4), "f16_r": Type("H", 2),
    "bf16_r": Type("B", 2), "f8_r": Type("F8", 1), "bf8_r": Type("B8", 1), "f8_fnuz_r": Type("F8N", 1),
    "bf8_fnuz_r": Type("B8N", 1), "i8_r": Type("I8", 1), "i32_r": Type("I", 4), "f4_r": Type("F4", 0.5),
})  # fmt: skip
#: types of A and of B that TensileLite has one symbol for, where they differ
MIXED: Mapping[tuple[str, str], str] = MappingProxyType({
    ("f8_r", "bf8_r"): "F8B8", ("bf8_r", "f8_r"): "B8F8",
    ("f8_fnuz_r", "bf8_fnuz_r"): "F8B8N", ("bf8_fnuz_r", "f8_fnuz_r"): "B8F8N",
})  # fmt: skip
COMPUTE = {"f32_r", "xf32_r", "f64_r", "i32_r", "f16_r"}


@dataclass(frozen=True)
class Gemm:
    """A problem that is tuned. trans_a, trans_b: N or T. leading: of A, B, C and D, in values. Types are keys of TYPES.

    What comes after the product (bias, activation, scales) is no part of it: one kernel of TensileLite serves all of
    them.
    """

    trans_a: str
    trans_b: str
    m: int
    n: int
    k: int
    batch: int
    a_type: str
    b_type: str
    c_type: str
    d_type: str
    compute_type: str
    leading: tuple[int, int, int, int]

    @property
    def flops(self) -> int:
        """Of one call: a multiplication and an addition for each term."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def data_symbol(self) -> str:
        """TensileLite's symbol of the types of A and B."""
        return MIXED.get((self.a_type, self.b_type)) or TYPES[self.a_type].symbol

    @property
    def kind(self) -> str:
        """What its configuration is named after: BBS_TN for bf16 in, bf16 out, summed in f32, A transposed."""
        symbols = self.data_symbol + TYPES[self.d_type].symbol + TYPES[self.compute_type].symbol
        return f"{symbols}_{self.trans_a}{self.trans_b}"

    @property
    def shape(self) -> str:
        """As a reader writes it."""
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"m {self.m}, n {self.n}, k {self.k}{batch}"

    def strides(self) -> tuple[int, int, int, int]:
        """Values from one matrix of a batch to the next, of A, B, C and D, without gaps."""
        a, b, c, d = self.leading
        return (a * (self.m if self.trans_a == "T" else self.k), b * (self.k if self.trans_b == "T" else self.n),
                c * self.n, d * self.n)  # fmt: skip


def why_not(gemm: Gemm) -> str | None:
    """Why a problem cannot be tuned; None where it can."""
    for name in (gemm.a_type, gemm.b_type, gemm.c_type, gemm.d_type):
        if name not in TYPES:
            return f"unknown data type {name[:40]!a}"
    if gemm.compute_type not in COMPUTE:
        return f"unknown compute type {gemm.compute_type[:40]!a}"
    if gemm.a_type != gemm.b_type and (gemm.a_type, gemm.b_type) not in MIXED:
        return f"TensileLite has no name for A of {gemm.a_type} and B of {gemm.b_type}"
    if gemm.trans_a not in ("N", "T") or gemm.trans_b not in ("N", "T"):
        return f"transA {gemm.trans_a[:20]!a} and transB {gemm.trans_b[:20]!a}: only N and T are tuned"
    sizes = (gemm.m, gemm.n, gemm.k, gemm.batch)
    if min(sizes) < 1:
        return f"an empty problem: {gemm.shape}"
    if max(*sizes, *gemm.leading) >= LARGEST:
        return "a size beyond 2^31"
    least = least_leading(gemm.trans_a, gemm.trans_b, gemm.m, gemm.n, gemm.k)
    if any(given < needed for given, needed in zip(gemm.leading, least, strict=True)):
        return f"leading dimensions {gemm.leading} are less than {least}"
    return None


def least_leading(trans_a: str, trans_b: str, m: int, n: int, k: int) -> tuple[int, int, int, int]:
    """The leading dimensions of A, B, C and D that are stored without gaps."""
    return (k if trans_a == "T" else m), (n if trans_b == "T" else k), m, m
