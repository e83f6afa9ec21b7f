"""Checks of decode attention over a cache in 8 bits, for any implementation of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.layouts.kv_states import QuantizedStates, zeros
from tests.support.parity import bits
from tests.support.rounded_cache import rounded

Arguments = tuple[Any, ...]


def quantized(case: Step, dtype: torch.dtype, form: str, device: torch.device) -> tuple[Arguments, AttentionShape]:
    """Arguments of a call as `made`, with a cache in `form`; slots that must not be read hold NaN scales and 127s."""
    (*rest, keys, values), shape = made(case, dtype, device)
    caches = []
    for one in (keys, values):
        cache = zeros(form, tuple(one.shape), dtype, device)
        assert isinstance(cache, QuantizedStates)
        cache[:, :, :] = one
        hidden = one.isnan().any(-1)
        cache.tensors[0][hidden] = 126  # of e4m3: 448
        assert cache.scale is not None
        assert cache.scale[hidden].isnan().all()
        caches.append(cache)
    return (*rest, *caches), shape


def _double(states: QuantizedStates) -> Tensor:
    return replace(states, dtype=torch.float64)[:].cpu()


def assert_codes(case: Step, args: Arguments, shape: AttentionShape, form: str) -> None:
    """The new tokens' keys and values lie in the cache as the formula rounds them, and nothing else was written."""
    before, _ = quantized(case, args[0].dtype, form, args[0].device)
    qkv, positions = args[0], args[1]
    floats = [one.new_zeros(one.shape[0], shape.kv_heads, case.capacity, shape.size) for one in (positions, positions)]
    floats = [one.to(qkv.dtype) for one in floats]
    from accelpatch.kernels.ops.attention.decode_attention import reference_

    reference_(qkv.clone(), positions, args[2], args[3], *floats, shape)  # k and v as a float cache gets them
    for given, after, plain in zip(before[4:], args[4:], floats, strict=True):
        left = [one.clone() for one in after.tensors]
        for row, slot in enumerate(case.slots):
            new = slice(slot, slot + case.tokens)
            due = rounded(plain[row, :, new].cpu(), form)
            step = plain[row, :, new].double().abs().amax(-1, keepdim=True).cpu() / (127 if form == "int8" else 14)
            far = (_double(after)[row, :, new] - due).abs()
            # k may differ by a rounding of its own dtype, and then by a code at the most
            assert bool((far <= 1.01 * step + 1e-30).all())
            assert bool((far <= step * 0.01).double().mean() > 0.9)
            for tensor, old in zip(left, given.tensors, strict=True):
                tensor[row, :, new] = old[row, :, new]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(left, given.tensors, strict=True))


def _exact(case: Step, args: Arguments, shape: AttentionShape) -> Tensor:
    """y in float64 over what the cache holds after a call."""
    from tests.kernels.ops.attention.test_decode_attention import over, rotated

    qkv, positions, slot, mask = (one.cpu() for one in args[:4])
    keys, values = (_double(one) for one in args[4:])
    rows, tokens = positions.shape
    q = qkv.double().view(rows, tokens, -1, shape.size)[:, :, : shape.heads]
    if shape.q_norm is not None:
        weight = shape.q_norm.cpu().double() + shape.plus_one
        q = torch.nn.functional.rms_norm(q, [shape.size], weight, shape.eps)
    q = rotated(q, positions[:, :, None].double() * shape.inv_freq.cpu().double())
    found = []
    for row, new in enumerate(slot.tolist()):
        for token in range(tokens):
            own = new + token
            first = max(0, own + 1 - shape.window) if shape.window else 0
            at = [one for one in range(first, own + 1) if one >= new or mask[row, one]]
            found.append(over(q[row, token], keys[row][:, at], values[row][:, at], shape))
    return torch.stack(found).flatten(1)


def assert_sums(
    case: Step, args: Arguments, shape: AttentionShape, y: Tensor, plain: tuple[Tensor, Arguments] | None
) -> None:
    """y is attention over what the cache holds. plain: torch's y and its arguments after it; None for float32's own."""
    exact = _exact(case, args, shape)
    error = (y.cpu().double().view(exact.shape) - exact).abs().max().item()
    if plain is None:
        assert error <= 2e-4 * exact.abs().max().item(), error  # angles are float32
        return
    its = (plain[0].cpu().double().view(exact.shape) - _exact(case, plain[1], shape)).abs().max().item()
    assert error <= 2 * its + torch.finfo(y.dtype).eps * exact.abs().max().item(), (error, its)


def assert_same_bits(op: Any, case: Step, dtype: torch.dtype, form: str, device: torch.device) -> None:
    """A row's tokens get the bits that they get token by token, alone, without the padding; and so does the cache."""
    args, shape = quantized(case, dtype, form, device)
    mine, _ = quantized(case, dtype, form, device)
    y = op(*mine, shape).view(case.rows, case.tokens, -1)
    for row in range(case.rows):
        padding = case.padding if row == case.rows - 1 else 0
        qkv, positions, slot, mask, *caches = args
        first = int(slot[row]) - padding
        keys, values = (_cut(one, row, padding, first + case.tokens) for one in caches)
        mask = mask[row : row + 1, padding:][:, : first + case.tokens].clone()
        for token in range(case.tokens):
            at, own = torch.full_like(slot[:1], first + token), row * case.tokens + token
            where = positions[row : row + 1, token : token + 1].clone()
            alone = op(qkv[own : own + 1].clone(), where, at, mask, keys, values, shape)
            mask[:, first + token] = 1
            assert torch.equal(bits(alone[0]), bits(y[row, token])), (row, token)
        for cut, whole in zip((keys, values), mine[4:], strict=True):
            for one, other in zip(cut.tensors, whole.tensors, strict=True):
                new = other[row, :, padding:][:, first : first + case.tokens]
                assert torch.equal(bits(one[0, :, first:]), bits(new))


def _cut(states: QuantizedStates, row: int, padding: int, length: int) -> QuantizedStates:
    assert states.scale is not None
    q, scale = (
        one[row : row + 1, :, padding:][:, :, :length].clone() for one in (states.q.view(torch.int8), states.scale)
    )
    return replace(states, q=q.view(states.q.dtype), scale=scale)
