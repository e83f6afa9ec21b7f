"""MXFP4 weights as others store them, in the canonical form: codes of e2m1 and a power of two for each 32 values.

    compressed-tensors   weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]
    gpt-oss              gate_up_proj_blocks uint8 [E, 2 I, H / 32, 16], gate_up_proj_scales uint8 [E, 2 I, H / 32] and
                         gate_up_proj_bias[E, 2 I], whose rows are of gate and up by turns; down_proj_... [E, H, I / 32]

Two codes a byte, the even k in the low nibble; a scale's byte e is 2^(e - 127), and 255 is NaN. All bits stay as they
are. What cannot be so is refused with a KernelError that begins with the tensor's name. Sources: OCP Microscaling
Formats (MX) Specification, v1.0; compressed-tensors 0.20; transformers 5.24, integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import E8M0
from accelpatch.kernels.codebooks import MXFP4_GROUP as GROUP
from accelpatch.kernels.layouts.row_major import Int4Rows

Tensors = Mapping[str, Tensor | None]
NAN = 255
UP, DOWN = "gate_up_proj", "down_proj"


def packed(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int4Rows:
    """A linear layer[n, k] of compressed-tensors, mxfp4-pack-quantized. config: not read."""
    if k % GROUP:
        raise KernelError(f"weight_packed: K = {k} is no multiple of the {GROUP} values that share a scale")
    codes, scales = _bytes(tensors, "weight_packed", (n, k // 2)), _exponents(tensors, "weight_scale", (n, k // GROUP))
    return Int4Rows(codes.view(torch.int8), scales.view(E8M0), codes="e2m1")


def experts(tensors: Tensors, config: Mapping[str, Any], *_: Any) -> dict[str, Tensor]:
    """All experts of a layer of gpt-oss, as our state dict has them: ..._q, ..._scale and ..._bias of both weights, the
    rows of gate before those of up. config: number, of experts, and shapes, (N, K) of each of the weights."""
    made: dict[str, Tensor] = {}
    for name in (UP, DOWN):
        n, k = config["shapes"][name]
        if k % GROUP:
            raise KernelError(f"{name}_blocks: K = {k} is no multiple of the {GROUP} values that share a scale")
        shape = (config["number"], n, k // GROUP)
        codes = _bytes(tensors, f"{name}_blocks", (*shape, GROUP // 2)).flatten(2)
        scales, bias = _exponents(tensors, f"{name}_scales", shape), tensors.get(f"{name}_bias")
        if bias is None or not bias.is_floating_point() or bias.shape != shape[:2]:
            found = "missing" if bias is None else f"{bias.dtype} {list(bias.shape)}"
            raise KernelError(f"{name}_bias is {found}, and floats {list(shape[:2])} belong here")
        if name == UP:
            codes, scales, bias = (torch.cat((one[:, 0::2], one[:, 1::2]), 1) for one in (codes, scales, bias))
        made |= {f"{name}_q": codes.view(torch.int8), f"{name}_scale": scales.view(E8M0), f"{name}_bias": bias}
    return made


def _exponents(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Tensor:
    scales = _bytes(tensors, name, shape, (torch.uint8, E8M0))
    if bool((wrong := scales == NAN).any()):
        place = [int(one) for one in wrong.nonzero()[0]]
        raise KernelError(f"{name}{place} is {NAN}, which is NaN: fetch it again")
    return scales


def _bytes(
    tensors: Tensors, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise KernelError(f"{name} is missing")
    if found.dtype not in dtypes or found.shape != shape:
        raise KernelError(f"{name} is {found.dtype} {list(found.shape)}, and uint8 {list(shape)} belongs here")
    return found.view(torch.uint8).contiguous()
