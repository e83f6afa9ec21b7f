"""The matrices of a layer's experts, w[E, N, K], as GPU kernels read them; each layout with its inverse.

Floats lie as they are, and so do int8 with a scale a row, and e4m3 with a scale for each 128 values. 4-bit codes lie in
words of 32 bits, 16 for each block of 128 values of K: nibble p of word j holds value ``16 p + j``. Neighbouring words
then go with neighbouring values of x, and the codes of one nibble belong to one group. K is padded with the code 0 up
to whole blocks. Where the HIP kernels run, 4-bit codes lie in their tiles instead (expert_tiles.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accelpatch.kernels.codebooks import E4M3, E8M0, FP8_CODES, NVFP4
from accelpatch.kernels.layouts import expert_tiles
from accelpatch.kernels.layouts.layout import nbytes_of
from accelpatch.kernels.layouts.tiling import TILE_ROWS

BLOCK, WORDS = 128, 16  # values of K, and words, of a block
BITS = {torch.int8: 8, torch.int32: 4}


class Stack(NamedTuple):
    """Weights of E experts. w: float, int8 or e4m3fn [E, N, K], or int32 words [E, N, 16 blocks] of 4-bit codes.

    Or int8 tiles [E, tiles, steps, 1024], with scale and offset in tables of theirs (expert_tiles.py).
    scale[E, N, G]: of a quantised weight. offset[E, N, G]: the minimum of 4-bit codes; None: w = (u - 8) * scale. Where
    scale is float8_e8m0fnu, or int16 in tiles, codes are those of e2m1; where it is float8_e4m3fn those of NVFP4, and
    offset[E, N, 1] float64 has the factors of rows. bias[E, N]: float, or None.
    """

    w: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of_codes(cls, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None) -> Stack:
        """From 4-bit codes q[E, N, K / 2], the even k in the low nibble."""
        return cls(to_words(q), scale, offset, bias)

    @classmethod
    def of_int8(cls, q: Tensor, scale: Tensor, offset: None = None, bias: Tensor | None = None) -> Stack:
        """From int8 or e4m3fn q[E, N, K], which stays as it is."""
        return cls(q, scale, None, bias)

    @classmethod
    def of_tiles(
        cls, q: Tensor, scale: Tensor, offset: Tensor | None = None, bias: Tensor | None = None, *, interleaved: bool
    ) -> Stack:
        """The same in tiles (expert_tiles.py). interleaved: for the rows of gate and up."""
        return cls(*expert_tiles.tiled(q, scale, offset, interleaved=interleaved), bias)

    def expert(self, number: int) -> Stack:
        """One expert's matrix as a Stack of its own, a view."""
        return Stack(*(None if one is None else one[number : number + 1] for one in self))  # type: ignore[arg-type]

    def canonical(self, k: int, *, interleaved: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """q, scale, offset and bias of matrices [N, k]. interleaved: whether rows of tiles are those of gate and up."""
        if self.tiled:
            assert self.scale is not None
            return *expert_tiles.untiled(self.w, self.scale, self.offset, interleaved=interleaved), self.bias
        return from_words(self.w, k) if self.bits == 4 else self.w, *self[1:]

    @property
    def tiled(self) -> bool:
        """Whether the weights lie in tiles."""
        return self.w.dim() == 4

    @property
    def bits(self) -> int:
        """Bits of a value: 4, 8, 16 or more."""
        return 4 if self.tiled else BITS.get(self.w.dtype, 8 * self.w.element_size())

    @property
    def codes(self) -> str:
        """The name of the codebook that the codes are of, or FP8_CODES; or ""."""
        if self.scale is None or self.w.dtype == E4M3:
            return FP8_CODES if self.scale is not None else ""
        return {torch.int16 if self.tiled else E8M0: "e2m1", E4M3: NVFP4}.get(self.scale.dtype, "")

    @property
    def n(self) -> int:
        """Rows of each matrix."""
        return self.w.shape[1] * (TILE_ROWS if self.tiled else 1)

    @property
    def groups(self) -> int:
        """Groups of a row; 1 where the weights have no scales."""
        if self.scale is None:
            return 1
        return self.scale.shape[2] * self.scale.shape[4] if self.tiled else self.scale.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return nbytes_of(self)


def to_words(q: Tensor) -> Tensor:
    """int8 [..., K / 2], two codes a byte -> int32 [..., 16 * blocks]."""
    codes = q.view(torch.uint8)
    blocks = -(-2 * codes.shape[-1] // BLOCK)
    codes = torch.nn.functional.pad(codes, (0, blocks * BLOCK // 2 - codes.shape[-1]))
    values = torch.stack((codes & 15, codes >> 4), dim=-1).view(*codes.shape[:-1], blocks, 4, 2, WORDS)
    pairs = values[..., 0, :] | values[..., 1, :] << 4  # byte i of a word: nibbles 2 i and 2 i + 1
    return pairs.transpose(-1, -2).contiguous().view(torch.int32).flatten(-3)


def from_words(words: Tensor, k: int) -> Tensor:
    """int8 [..., K / 2] from words; the inverse of `to_words`."""
    pairs = words.contiguous().view(torch.uint8).view(*words.shape[:-1], -1, WORDS, 4).transpose(-1, -2)
    values = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-4)  # block, byte, nibble, word: in the order of k
    return (values[..., :k:2] | values[..., 1:k:2] << 4).contiguous().view(torch.int8)
