"""Canonical weights packed as GPTQ, AWQ and compressed-tensors have them: the way back of their
readers, which list the tensors (packed_formats.py).

    w[n, k] = scale[n, g] (code[n, k] - zero[n, g])

zero is an integer, so that a float minimum fits only where it is -zero scale. Codes and scales stay as they are; only
GPTQ and AWQ, whose scales are float16, round wider ones. A scale of 0, which readers refuse, becomes 1 with codes
that are all zero: the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int3Rows, Int4Rows, Int8Rows
from accelpatch.kernels.ops.linear import int3_linear
from accelpatch.quant import int4

AWQ_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of a word holds this column of eight
WORD = 32
SYMMETRIC = "quantise by a recipe whose int{}_weight_only has options: {{symmetric: true}}"
#: what GPTQ's first version takes off every zero point, in whole words
LESS_ONE = {4: 0x11111111, 8: 0x01010101}
THREE = 32  # codes of 3 bits that lie in whole words together


@dataclass(frozen=True, eq=False)
class Coded:
    """codes[N, K] uint8 in the order of the inputs, scale[N, G], zero[N, G] uint8 (None: the middle of the codes).

    groups[K] int32: the group of each input; None where they are in order.
    """

    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    groups: Tensor | None = None

    @property
    def zeros(self) -> Tensor:
        """zero[N, G], the middle of the codes too."""
        return torch.full(self.scale.shape, 1 << (self.bits - 1), dtype=torch.uint8) if self.zero is None else self.zero


def zero_points(scale: Tensor, offset: Tensor | None, bits: int = 4) -> Tensor | None:
    """The zero points [N, G] uint8 of a weight; None where it is symmetric. offset: integers, or float minima.

    Raises KernelError where a minimum is not exactly -zero scale with an integer zero that has so many bits.
    """
    most = (1 << bits) - 1
    if offset is None:
        return None
    if not offset.is_floating_point():
        if int(offset.min()) < 0 or int(offset.max()) > most:
            raise KernelError(
                f"zero points from {int(offset.min())} to {int(offset.max())}, and {bits} bits have 0 to {most}"
            )
        return offset.to(torch.uint8)
    wide, minimum = scale.float(), offset.float()
    zero = (-minimum / torch.where(wide == 0, 1.0, wide)).round().clamp_(0, most)
    if not torch.equal(-zero * wide, minimum):
        raise KernelError(f"float minima, and other formats have integer zero points: {SYMMETRIC.format(bits)}")
    return zero.to(torch.uint8)


def has_zero_points(scale: Tensor, offset: Tensor | None, bits: int = 4) -> bool:
    """Whether a weight has zero points besides the middle. Raises what `zero_points` raises."""
    zero = zero_points(scale, offset, bits)
    return zero is not None and not bool((zero == 1 << (bits - 1)).all())


def coded(weight: Int8Rows | Int4Rows | Int3Rows, group_size: int | None) -> Coded:
    """A weight-only quantised weight[N, K], its groups cut into ones of `group_size`, which divides; None: rows."""
    bits, order, k = weight.bits, weight.order, weight.k
    group_size = group_size or k
    if isinstance(weight, Int4Rows):
        codes, zero = int4.unpack(weight.w).to(torch.uint8), zero_points(weight.scale, weight.offset)
    elif isinstance(weight, Int3Rows):
        codes, zero = int3_linear.unpack(weight.w).to(torch.uint8), zero_points(weight.scale, weight.offset, bits)
    else:
        codes, zero = (weight.w.to(torch.int16) + 128).to(torch.uint8), None
    times = k // group_size // weight.scale.shape[1]
    scale = weight.scale.repeat_interleave(times, dim=1)
    zero = None if zero is None else zero.repeat_interleave(times, dim=1)
    made = _without_zero_scales(Coded(bits, codes, scale, zero), group_size)
    if order is None:
        return made
    groups = torch.empty(k, dtype=torch.int32)
    groups[order.long()] = torch.arange(k, dtype=torch.int32) // group_size
    return replace(made, codes=made.codes[:, order.long().argsort()], groups=groups)


def _without_zero_scales(weight: Coded, group_size: int) -> Coded:
    nothing = weight.scale == 0
    if not bool(nothing.any()):
        return weight
    groups = weight.codes.unflatten(1, (-1, group_size))
    codes = torch.where(nothing.unsqueeze(2), weight.zeros.unsqueeze(2), groups).flatten(1)
    return replace(weight, codes=codes, scale=torch.where(nothing, 1.0, weight.scale.float()).to(weight.scale.dtype))


def gptq(weight: Coded, first_version: bool) -> dict[str, Tensor]:
    """The tensors of a linear layer of GPTQ. first_version: v1, whose zero points are less one."""
    k, bits = weight.codes.shape[1], weight.bits
    zeros = packed(weight.zeros.t(), bits).long() - (LESS_ONE.get(bits, 0) if first_version else 0)
    if bits == 3 and first_version:  # whose words have no fields of their own
        zeros = packed(weight.zeros.t().to(torch.int16) - 1 & 7, bits).long()
    groups = weight.groups
    if groups is None:
        groups = torch.arange(k, dtype=torch.int32) // (k // weight.scale.shape[1])
    return {
        "qweight": packed(weight.codes, bits).t().contiguous(), "qzeros": zeros.to(torch.int32),
        "scales": half(weight.scale).t().contiguous(), "g_idx": groups,
    }  # fmt: skip


def awq(weight: Coded) -> dict[str, Tensor]:
    """The tensors of a linear layer of AWQ, GEMM."""
    words = [packed(_interleaved(one.t()), 4) for one in (weight.codes, weight.zeros)]
    return {"qweight": words[0], "qzeros": words[1], "scales": half(weight.scale).t().contiguous()}


def _interleaved(codes: Tensor) -> Tensor:
    """codes[rows, N] with the columns of each eight as a word's fields have them."""
    return codes.unflatten(1, (-1, 8))[:, :, AWQ_FIELDS].flatten(1)


def pack_quantized(weight: Coded, dtype: torch.dtype, symmetric: bool) -> dict[str, Tensor]:
    """The tensors of a linear layer of compressed-tensors, pack-quantized. dtype: the model's."""
    made = {
        "weight_packed": packed(weight.codes, weight.bits), "weight_scale": _stored(weight.scale, dtype),
        "weight_shape": torch.tensor(list(weight.codes.shape)),
    }  # fmt: skip
    if not symmetric:
        made["weight_zero_point"] = packed(weight.zeros.t(), weight.bits).t().contiguous()
    return made if weight.groups is None else made | {"weight_g_idx": weight.groups}


def rows(q: Tensor, scale: Tensor, input_scale: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a linear layer of compressed-tensors, int-quantized or float-quantized. dtype: the model's."""
    scale = torch.where(scale == 0, 1.0, scale)  # rows of zeros
    made = {"weight": q, "weight_scale": _stored(scale, dtype)}
    return made if input_scale is None else made | {"input_scale": _stored(input_scale, dtype)}


def four_bit_floats(q: Tensor, scale: Tensor, factors: Tensor | None) -> dict[str, Tensor]:
    """Codes of e2m1 with scales in E8M0 as MXFP4, or with ones in e4m3 and the factors of rows as NVFP4."""
    packed = {"weight_packed": q.view(torch.uint8)}
    if factors is None:
        return packed | {"weight_scale": scale.view(torch.uint8)}
    whole = one_factor(factors).reciprocal().float().reshape(1)
    return packed | {"weight_scale": scale, "weight_global_scale": whole}


def one_factor(factors: Tensor) -> Tensor:
    """The factor of all rows of a weight in NVFP4. Raises KernelError where they differ."""
    if not bool((factors == factors[0]).all()):
        raise KernelError("factors that differ from row to row, and NVFP4 has one for a weight in its files")
    return factors[0]


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the model's dtype, as the format's own tools write them, where it holds them; else as they are."""
    cast = scale.to(dtype)
    return cast if torch.equal(cast.float(), scale.float()) else scale


def half(scale: Tensor) -> Tensor:
    """Scales as float16. Raises KernelError for what that has no number near: largest 65504, smallest 6e-8."""
    made = scale.to(torch.float16)
    if not bool((made.isfinite() & ((made != 0) | (scale == 0))).all()):
        least, most = (float(one) for one in torch.aminmax(scale[scale != 0].abs()))
        raise KernelError(f"scales from {least:.2g} to {most:.2g}, and the format's are float16")
    return made


def packed(codes: Tensor, bits: int) -> Tensor:
    """int32 words [rows, columns bits / 32, rounded up] of codes[rows, columns], the low field first; of 3 bits 32
    codes in three words, bit after bit."""
    if bits == 3:
        filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % THREE))
        return int3_linear.pack(filled).view(torch.int32)
    fields = WORD // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % fields))
    words = torch.zeros(len(codes), padded.shape[1] // fields, dtype=torch.int32)
    for field in range(fields):
        words |= padded[:, field::fields].to(torch.int32) << field * bits
    return words
