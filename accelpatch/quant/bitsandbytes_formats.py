"""Quantised weights as bitsandbytes packs them, in the canonical form (kernels/layouts/row_major.py).

    4 bits        weight, bytes of w[N, K] in row-major order, the first value of two in the high nibble; absmax of each
                  64 (`blocksize`) values in that order, as floats, or quantised themselves (double quantisation)
    LLM.int8()    weight int8 [N, K], SCB[N]: the largest magnitude of each row

Codes stay as they are. absmax becomes float32 as bitsandbytes computes it; where K is no multiple of the block, groups
along K are as long as both allow. LLM.int8() splits outliers off the activations, which stay float here. What this form
cannot represent is refused with a KernelError that begins with the tensor's name. Source: bitsandbytes 0.50.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.layouts.row_major import Int4Rows, Int8Rows

Tensors = Mapping[str, Tensor | None]
STATES = {"nf4": "weight.quant_state.bitsandbytes__nf4", "fp4": "weight.quant_state.bitsandbytes__fp4"}
LONGEST_STATE = 4096  # bytes of JSON
LARGEST = 64  # values of a group: those of larger blocks are split
LARGEST_BLOCK = 1 << 31
NESTED = 256  # codes of a quantised absmax


def four_bits(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int4Rows:
    """A linear layer[n, k] in nf4 or fp4. config is not read: the tensors describe the format."""
    name, state = _state(tensors, n, k)
    size = state["blocksize"]
    codes = _given(tensors, "weight").contiguous().flatten().view(torch.uint8)  # whatever dtype it is stored in
    if n * k % 2 or codes.numel() != n * k // 2:
        raise KernelError(f"weight has {codes.numel()} bytes, and {n} x {k} values of 4 bits belong here")
    q = ((codes & 15) << 4 | codes >> 4).view(torch.int8)
    if k % 2:
        raise KernelError(f"weight: K = {k} is odd, and codes that cross rows within a byte are not read")
    group, absmax = math.gcd(k, size, LARGEST), _absmax(tensors, state, -(-n * k // size))
    book = _given(tensors, "weight.quant_map")
    if book.numel() != len(CODEBOOKS[name]) or not torch.allclose(
        book.float().flatten().cpu(), torch.tensor(CODEBOOKS[name]), rtol=0, atol=1e-6
    ):
        raise KernelError(f"weight.quant_map is another one than {name}'s, and is not read")
    first = torch.arange(0, n * k, group, device=absmax.device) // size  # the block of each group
    return Int4Rows(q.view(n, k // 2), absmax[first].view(n, k // group), codes=name)


def int8(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int8Rows:
    """A linear layer[n, k] of LLM.int8(). config: not read."""
    q, largest, order = _given(tensors, "weight"), _given(tensors, "SCB"), tensors.get("weight_format")
    if q.dtype != torch.int8 or list(q.shape) != [n, k]:
        raise KernelError(f"weight is {q.dtype} {list(q.shape)}, and int8 {[n, k]} belongs here")
    if order is not None and bool(order.any()):
        raise KernelError("weight_format is not that of rows: save the model again with a newer bitsandbytes")
    if not largest.is_floating_point() or largest.numel() != n:
        raise KernelError(f"SCB is {largest.dtype} {list(largest.shape)}, and floats [{n}] belong here")
    scale = largest.float().reshape(n, 1) / 127
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise KernelError("SCB has NaN, infinity or a negative number")
    return Int8Rows(q, scale)


def _state(tensors: Tensors, n: int, k: int) -> tuple[str, dict[str, Any]]:
    """nf4 or fp4, and the block sizes and the offset in the quant_state, the JSON stored with the weight."""
    states = [(name, one) for name, place in STATES.items() if (one := tensors.get(place)) is not None]
    if len(states) != 1:
        raise KernelError(f"weight has {len(states)} states {', '.join(STATES.values())}, and one belongs here")
    (name, stored), place = states[0], STATES[states[0][0]]
    try:
        if stored.dtype != torch.uint8 or stored.numel() > LONGEST_STATE:
            raise ValueError("no bytes of a short text")
        state = json.loads(bytes(stored.flatten().tolist()))
        size, shape = state["blocksize"], list(state["shape"])
        nested = state.get("nested_blocksize", NESTED), float(state.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise KernelError(f"{place} is not bitsandbytes' JSON ({error})") from error
    if state.get("quant_type") != name or shape != [n, k]:
        raise KernelError(f"{place} says {state.get('quant_type')} {shape}, and {name} {[n, k]} belongs here")
    if any(type(one) is not int or not 1 <= one <= LARGEST_BLOCK or one & (one - 1) for one in (size, nested[0])):
        raise KernelError(f"{place} says blocks of {size} and {nested[0]}, and powers of two belong here")
    return name, {"blocksize": size, "nested_blocksize": nested[0], "nested_offset": nested[1]}


def _absmax(tensors: Tensors, state: Mapping[str, Any], blocks: int) -> Tensor:
    """The scale of each block, float32[blocks]."""
    absmax = _given(tensors, "weight.absmax").flatten()
    if absmax.numel() != blocks or (absmax.dtype != torch.uint8 and not absmax.is_floating_point()):
        raise KernelError(f"weight.absmax is {absmax.dtype} {list(absmax.shape)}, and [{blocks}] belongs here")
    if absmax.dtype == torch.uint8:
        levels, scales = _given(tensors, "weight.nested_quant_map"), _given(tensors, "weight.nested_absmax").flatten()
        size = state["nested_blocksize"]
        if levels.numel() != NESTED or scales.numel() != -(-blocks // size):
            found = f"{levels.numel()} levels and {scales.numel()} scales"
            raise KernelError(f"weight.nested_absmax: {found}, and {NESTED} and {-(-blocks // size)} belong here")
        of_block = scales.float()[torch.arange(blocks, device=absmax.device) // size]
        absmax = levels.float().flatten()[absmax.int()] * of_block + state["nested_offset"]
    if not bool(absmax.isfinite().all()):
        raise KernelError("weight.absmax has NaN or infinity")
    return absmax.float()


def _given(tensors: Tensors, name: str) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise KernelError(f"{name} is missing")
    return found
