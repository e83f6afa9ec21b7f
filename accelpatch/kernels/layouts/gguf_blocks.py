"""Weights as GGUF stores them: rows of whole blocks, each with its own scales (https://github.com/ggml-org/ggml).

    Q8_0   32 values in 34 bytes    d, 32 int8                                        w = d q
    Q4_0   32 values in 18 bytes    d, 16 bytes of nibbles                            w = d (q - 8)
    Q4_1   32 values in 20 bytes    d, m, 16 bytes of nibbles                         w = d q + m
    Q4_K  256 values in 144 bytes   d, dmin, 12 bytes of 6-bit scales and minimums,   w = (d sc) q - dmin mn
                                    128 bytes of nibbles; eight groups of 32
    Q6_K  256 values in 210 bytes   128 bytes of low nibbles, 64 of high bit pairs,   w = (d sc) (q - 32)
                                    16 int8 scales, d; sixteen groups of 16

d, m and dmin are float16. Nothing is packed anew: scales of two levels and 6-bit codes stay as they lie in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.layout import WeightArguments, concatenated, nbytes_of, why_not_split


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
    "Q4_K": Form(256, 144, 32, (0, 2)),
    "Q6_K": Form(256, 210, 16, (208,)),
}


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
class GgufBlocks:
    """w: uint8[N, row bytes]. form: a key of FORMS."""

    part: ClassVar[str] = "all"
    tiled: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    w: Tensor
    form: str

    @classmethod
    def pack(cls, blocks: Tensor, form: str) -> GgufBlocks:
        """From blocks uint8[N, row bytes], which stay where they are. Raises KernelError for other shapes."""
        columns(form, blocks.shape[1])
        return cls(blocks, form)

    def arguments(self) -> tuple[Tensor, str]:
        """What `block_linear` takes between x and the bias."""
        return self.w, self.form

    unpack = arguments

    @property
    def n(self) -> int:
        """Rows of the weight."""
        return int(self.w.shape[0])

    @property
    def k(self) -> int:
        """Columns of the weight."""
        return columns(self.form, int(self.w.shape[1]))

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return type(self), self.form, self.w.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return nbytes_of((self.w,))

    def launch(self) -> WeightArguments:
        """Raises KernelError: the device library reads no such blocks."""
        raise KernelError("the device library reads no GGUF blocks of two levels: Triton's kernels do")

    @staticmethod
    def why_not_concat(parts: Sequence[GgufBlocks]) -> str | None:
        """Rows of one format can always be concatenated."""
        return None

    @classmethod
    def concat(cls, parts: Sequence[GgufBlocks]) -> GgufBlocks:
        """Row after row; the parts become views."""
        return cls(concatenated([one.w for one in parts]), parts[0].form)

    def why_not_split(self, rows: Sequence[int]) -> str | None:
        """Rows can be split anywhere."""
        return why_not_split(self, rows)

    def split(self, rows: Sequence[int]) -> list[GgufBlocks]:
        """Parts of so many rows each; views. Raises KernelError where they do not make up the weight."""
        if reason := self.why_not_split(rows):
            raise KernelError(reason)
        return [GgufBlocks(part, self.form) for part in self.w.split(list(rows))]
