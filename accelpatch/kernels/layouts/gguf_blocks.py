"""Weights as GGUF stores them: rows of whole blocks, each with its own scales (https://github.com/ggml-org/ggml).

    Q8_0   32 values in 34 bytes    d, 32 int8                                        w = d q
    Q4_0   32 values in 18 bytes    d, 16 bytes of nibbles                            w = d (q - 8)
    Q4_1   32 values in 20 bytes    d, m, 16 bytes of nibbles                         w = d q + m
    Q5_0   32 values in 22 bytes    d, 4 bytes of fifth bits, 16 of nibbles           w = d (q - 16)
    Q5_1   32 values in 24 bytes    d, m, 4 bytes of fifth bits, 16 of nibbles        w = d q + m
    IQ4_NL 32 values in 18 bytes    d, 16 bytes of nibbles                            w = d IQ4[q]
    Q2_K  256 values in 84 bytes    16 bytes of 4-bit scales and minimums, 64 bytes   w = (d sc) q - dmin mn
                                    of bit pairs, d, dmin; sixteen groups of 16
    Q3_K  256 values in 110 bytes   32 bytes of third bits, 64 of bit pairs, 12       w = (d (sc - 32)) (q - 4)
                                    bytes of 6-bit scales, d; sixteen groups of 16
    Q5_K  256 values in 176 bytes   as Q4_K, and 32 bytes of fifth bits               w = (d sc) q - dmin mn
    IQ4_XS 256 values in 136 bytes  d, 16 high bit pairs, 4 bytes of low nibbles of   w = (d (sc - 32)) IQ4[q]
                                    scales, 128 bytes of nibbles; eight groups of 32
    Q4_K  256 values in 144 bytes   d, dmin, 12 bytes of 6-bit scales and minimums,   w = (d sc) q - dmin mn
                                    128 bytes of nibbles; eight groups of 32
    Q6_K  256 values in 210 bytes   128 bytes of low nibbles, 64 of high bit pairs,   w = (d sc) (q - 32)
                                    16 int8 scales, d; sixteen groups of 16

d, m and dmin are float16. Nothing is packed anew: scales of two levels and 6-bit codes stay as they lie in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import RowMajor


class Form(NamedTuple):
    """A kind of block. values, bytes: in one block. group: values that share a scale. floats: where its float16 lie."""

    values: int
    bytes: int
    group: int
    floats: tuple[int, ...]


FORMS = {
    "Q8_0": Form(32, 34, 32, (0,)),
    "Q4_0": Form(32, 18, 32, (0,)),
    "Q4_1": Form(32, 20, 32, (0, 2)),
    "Q5_0": Form(32, 22, 32, (0,)),
    "Q5_1": Form(32, 24, 32, (0, 2)),
    "Q2_K": Form(256, 84, 16, (80, 82)),
    "Q3_K": Form(256, 110, 16, (108,)),
    "Q5_K": Form(256, 176, 32, (0, 2)),
    "IQ4_NL": Form(32, 18, 32, (0,)),
    "IQ4_XS": Form(256, 136, 32, (0,)),
    "Q4_K": Form(256, 144, 32, (0, 2)),
    "Q6_K": Form(256, 210, 16, (208,)),
}

#: what the codes of IQ4_NL and IQ4_XS stand for
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def row_bytes(form: str, k: int) -> int:
    """Bytes of a row of k values. Raises KernelError where that is no whole number of blocks."""
    if form not in FORMS:
        raise KernelError(f"blocks of {form!r} are not read: {', '.join(FORMS)} are")
    kind = FORMS[form]
    if k < 1 or k % kind.values:
        raise KernelError(f"rows of {k} values are no whole number of {form} blocks of {kind.values}")
    return k // kind.values * kind.bytes


def columns(form: str, size: int) -> int:
    """Values in a row of so many bytes. Raises KernelError where that is no whole number of blocks."""
    if form not in FORMS or size < 1 or size % FORMS[form].bytes:
        raise KernelError(f"rows of {size} bytes are no whole number of {form} blocks")
    return size // FORMS[form].bytes * FORMS[form].values


@dataclass(frozen=True, eq=False)
class GgufBlocks(RowMajor):
    """w: uint8[N, row bytes]. form: a key of FORMS."""

    form: str

    def arguments(self) -> tuple[Tensor, str]:
        return self.w, self.form

    @property
    def k(self) -> int:
        """Columns of the weight. Raises KernelError where a row is no whole number of blocks."""
        return columns(self.form, int(self.w.shape[1]))
