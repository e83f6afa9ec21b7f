"""NVFP4 weights as others store them, in the canonical form: codes of e2m1, a scale in e4m3 for each 16 values, and a
float32 for the whole weight, which becomes the factor of each row, in float64.

    compressed-tensors   weight_packed uint8 [N, K / 2], weight_scale e4m3 [N, K / 16], weight_global_scale float32 [1],
                         by which scales are divided; input_global_scale
    ModelOpt             weight uint8 [N, K / 2], weight_scale e4m3 [N, K / 16], weight_scale_2 float32 [], by which
                         scales are multiplied; input_scale

Two codes a byte, the even k in the low nibble. Codes and scales stay as they are. The scale of the input, which their
kernels quantise to NVFP4 as well, is kept in ModelOpt's convention and not applied. Files whose float32 follows the
other library's convention are found by the size of their weights. What cannot be so is refused with a KernelError that
begins with the tensor's name. Sources: compressed-tensors 0.20, compressors/nvfp4; ModelOpt 0.47, qtensor/nvfp4_tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import E4M3, NVFP4
from accelpatch.kernels.codebooks import NVFP4_GROUP as GROUP
from accelpatch.kernels.layouts.row_major import Int4Rows

Tensors = Mapping[str, Tensor | None]
LARGEST = 6.0  # of e2m1
PLAUSIBLE = (1e-8, 1e4)  # the largest weight of a layer


def compressed(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int4Rows:
    """A linear layer[n, k] of compressed-tensors, nvfp4-pack-quantized. config: not read."""
    given = _one(tensors, "input_global_scale", optional=True)
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    return _rows(tensors, names, n, k, divides=True, given=None if given is None else given.reciprocal())


def modelopt(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int4Rows:
    """A linear layer[n, k] of ModelOpt, quant_algo NVFP4. config: not read."""
    given = _one(tensors, "input_scale", optional=True)
    return _rows(tensors, ("weight", "weight_scale", "weight_scale_2"), n, k, divides=False, given=given)


def _rows(
    tensors: Tensors, names: tuple[str, str, str], n: int, k: int, *, divides: bool, given: Tensor | None
) -> Int4Rows:
    packed, scaled, whole = names
    if k % GROUP:
        raise KernelError(f"{packed}: K = {k} is no multiple of the {GROUP} values that share a scale")
    codes = _checked_tensor(tensors, packed, torch.uint8, (n, k // 2)).view(torch.int8)
    scale = _checked_tensor(tensors, scaled, E4M3, (n, k // GROUP))
    wide = scale.float()
    if not bool((finite := wide.isfinite()).all()):
        raise KernelError(f"{scaled}{[int(i) for i in (~finite).nonzero()[0]]} is NaN: fetch it again")
    if bool(((wide == 0) & (codes.unflatten(1, (-1, GROUP // 2)) & 0x77).ne(0).any(2)).any()):
        raise KernelError(f"{scaled} has a zero where the codes in {packed} are not zero: fetch it again")
    one = _one(tensors, whole)
    assert one is not None
    factor = _factor(whole, one, float(wide.abs().max()), divides)
    return Int4Rows(codes, scale, factor.expand(n, 1).contiguous(), NVFP4, input_scale=given)


def _factor(name: str, one: Tensor, most: float, divides: bool) -> Tensor:
    """By what scales are multiplied: in the convention of the tensor's name, or where its weights are not plausible and
    those of the other are, in that one. most: the largest scale."""
    for way in (divides, not divides):
        factor = one.double().reciprocal() if way else one.double()  # scales times this, rounded once, are quotients
        if not most or PLAUSIBLE[0] <= LARGEST * most * float(factor) <= PLAUSIBLE[1]:
            return factor
    size = LARGEST * most
    raise KernelError(
        f"{name} is {float(one):.3g}, and neither {size / float(one):.3g} (divided, as in compressed-tensors) nor "
        f"{size * float(one):.3g} (multiplied, as in ModelOpt) is plausible as the largest weight: fetch it again"
    )


def _one(tensors: Tensors, name: str, *, optional: bool = False) -> Tensor | None:
    """A tensor of one float, as float32 [1]; None where it is missing and may be."""
    found = tensors.get(name)
    if found is None:
        if optional:
            return None
        raise KernelError(f"{name} is missing")
    if found.numel() != 1 or found.dtype != torch.float32:
        raise KernelError(f"{name} is {found.dtype} {list(found.shape)}, and one number in float32 belongs here")
    if not 0 < float(found) < float("inf") or float(found.reshape(1).reciprocal()) == float("inf"):
        raise KernelError(f"{name} is {float(found)}, and a scale is above zero and finite: fetch it again")
    return found.reshape(1)


def _checked_tensor(tensors: Tensors, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise KernelError(f"{name} is missing")
    if found.dtype != dtype or found.shape != shape:
        raise KernelError(f"{name} is {found.dtype} {list(found.shape)}, and {dtype} {list(shape)} belongs here")
    return found.contiguous()
