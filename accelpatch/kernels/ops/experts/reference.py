"""The reference of experts in plain torch; see experts.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.codebooks import CODEBOOKS, NVFP4
from accelpatch.kernels.layouts.expert_stack import WORDS, Stack
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.experts.cases import CLAMPED


def _gated(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    if activation != CLAMPED:
        return gated_activation.reference(gate, up, activation)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate / (1 + (-alpha * gate).exp()))


def dense(stack: Stack, expert: int, k: int, dtype: torch.dtype, interleaved: bool = False) -> Tensor:
    """One expert's matrix [N, K], decoded in float32 or wider and rounded to `dtype`. interleaved: of gate and up."""
    if stack.tiled:
        q, factor, least, _ = (
            None if one is None else one[0] for one in stack.expert(expert).canonical(0, interleaved=interleaved)
        )
        assert q is not None
        assert factor is not None
        packed = q.view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        return _decoded(codes, factor, least, 4, stack.codes, dtype)
    w, scale = stack.w[expert], stack.scale
    if scale is None:
        return w.to(dtype)
    codes = w
    if stack.bits == 4:
        packed = w.view(len(w), -1, 1, WORDS)
        codes = torch.cat([(packed >> 4 * nibble) & 15 for nibble in range(8)], dim=2).flatten(1)[:, :k]
    least = None if stack.offset is None else stack.offset[expert]
    return _decoded(codes, scale[expert], least, stack.bits, stack.codes, dtype)


def _decoded(codes: Tensor, scale: Tensor, offset: Tensor | None, bits: int, book: str, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    if book in CODEBOOKS:
        codes = torch.tensor(CODEBOOKS[book], dtype=wide, device=codes.device)[codes.long()]
    groups, factor = codes.to(wide).view(len(codes), scale.shape[1], -1), scale.to(wide)[:, :, None]
    if book == NVFP4 and offset is not None:
        made = groups * (scale.double() * offset.double()).to(wide)[:, :, None]
    elif offset is not None:
        made = groups * factor + offset.to(wide)[:, :, None]
    else:
        made = (groups - 8 if bits == 4 and not book else groups) * factor
    return made.flatten(1).to(dtype)


def reference(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """Expert after expert by torch's own linear layer; the sum in float32 or wider."""
    up, down, gate, residual = Stack(*given[:4]), Stack(*given[4:8]), given[8:11], given[11:]
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(len(up.w)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        biases = [None if one.bias is None else one.bias[expert].to(x.dtype) for one in (up, down)]
        both = functional.linear(x[token], dense(up, expert, x.shape[1], x.dtype, True), biases[0])
        inner = _gated(both, *gate)
        made = functional.linear(inner, dense(down, expert, inner.shape[1], x.dtype), biases[1])
        y.index_add_(0, token, made.to(wide) * weights[token, place, None].to(wide))
    made = y.to(x.dtype)
    return made if residual in ((), (None,)) else residual[0] + made
