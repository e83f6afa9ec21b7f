"""Attention of new tokens over a static cache: against torch's attention in float64.

The Triton kernel on a GPU or interpreted (tests/support/interpreted.py); the plain torch form is always tested.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.attention.decode_attention import reference_
from accelpatch.kernels.triton import launch
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, LOW, here, interpret, needs_triton
from tests.support.parity import bits

CASES = {
    "grouped": Step(),
    "one-group": Step(heads=2, kv_heads=1, size=128, rows=1),
    "seven-to-one": Step(heads=7, kv_heads=1),
    "size-80": Step(size=80),
    "size-96": Step(size=96, padding=65),
    "size-256": Step(size=256),
    "first-slot": Step(slot=0),
    "last-slot": Step(slot=255),
    "end-of-a-block": Step(slot=64, padding=3),
    "padding": Step(padding=69),
    "window": Step(window=20),
    "window-and-padding": Step(window=60, padding=40),
    "norms": Step(norms=True, size=16),
    "gemma-norms": Step(norms=True, plus_one=True, softcap=5.0),
    "softcap": Step(softcap=2.0),
    "partial": Step(size=96, rotary_dim=24),
    "hidden": Step(padding=3, hidden=5),
    "two-runs": Step(capacity=512, slot=300, padding=270),
    "two-runs-of-a-padded-row": Step(capacity=1024, slot=700, padding=270),
    "window-in-the-last-run": Step(capacity=1024, slot=800, window=100),
    "runs-not-used": Step(capacity=1024, slot=100),
    "two-tokens": Step(tokens=2, padding=5),
    "eight-tokens": Step(tokens=8, heads=12, kv_heads=2, norms=True, size=32),
    "eight-first": Step(tokens=8, slot=0, window=3),
    "tokens-in-two-runs": Step(tokens=8, slot=252, capacity=512, padding=1, window=250),
    "tokens-to-the-end": Step(tokens=3, slot=253, softcap=3.0),
    "sinks": Step(sinks=True),
    "sinks-of-three-runs": Step(capacity=768, slot=700, padding=3, tokens=2, heads=7, kv_heads=1, size=128, sinks=True),
    "sinks-and-window": Step(tokens=8, slot=252, capacity=512, heads=8, window=128, softcap=2.0, sinks=True),
}


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """x[B, T, H, D] in float64 by angle[B, T, R / 2], as complex numbers."""
    some, rest = x.split([2 * angle.shape[-1], x.shape[-1] - 2 * angle.shape[-1]], dim=-1)
    one = torch.complex(*some.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    return torch.cat([one.real, one.imag, rest], dim=-1)


def over(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """One query q[H, D] over k, v[Hkv, S, D], all of which it sees."""
    k, v = (one.repeat_interleave(shape.heads // shape.kv_heads, 0) for one in (k, v))
    if not shape.softcap and shape.sinks is None:
        return functional.scaled_dot_product_attention(q[:, None], k, v, scale=shape.scaling)
    scores = (q[:, None] * k).sum(-1) * shape.scaling
    scores = torch.tanh(scores / shape.softcap) * shape.softcap if shape.softcap else scores
    weights = scores.exp()
    sinks = 0 if shape.sinks is None else shape.sinks.cpu().double().exp()[:, None]
    return (weights / (weights.sum(-1, keepdim=True) + sinks))[:, None] @ v


def in_float64(args: tuple[Tensor, ...], shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """(y, k, v) by torch's own attention, token by token over the slots that it sees, and angles as complex numbers."""
    qkv, positions, slot, mask, keys, values = (
        one.cpu().double() if one.is_floating_point() else one.cpu() for one in args
    )
    rows, tokens = positions.shape
    parts = qkv.view(rows, tokens, -1, shape.size)
    q, k, v = parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
    if shape.q_norm is not None and shape.k_norm is not None:
        q, k = (
            functional.rms_norm(p, [shape.size], w.cpu().double() + shape.plus_one, shape.eps)
            for p, w in ((q, shape.q_norm), (k, shape.k_norm))
        )
    angle = positions[:, :, None].double() * shape.inv_freq.cpu().double()
    q, k = rotated(q, angle), rotated(k, angle)
    found = []
    for row, new in enumerate(slot.tolist()):
        for token in range(tokens):
            first = max(0, new + token + 1 - shape.window) if shape.window else 0
            at = [one for one in range(first, new) if mask[row, one]]
            own = range(max(0, first - new), token + 1)
            seen = (torch.cat([held[row][:, at], one[row, own].transpose(0, 1)], dim=1)
                    for held, one in ((keys, k), (values, v)))  # fmt: skip
            found.append(over(q[row, token], *seen, shape))
    return torch.stack(found).flatten(1), k.transpose(1, 2), v.transpose(1, 2)


def new_of(case: Step, cached: Tensor) -> Tensor:
    """[B, H, T, D]: what a cache holds of the new tokens."""
    each = zip(cached, case.slots, strict=True)
    return torch.stack([row[:, slot : slot + case.tokens] for row, slot in each])


def assert_float_rule(op: Any, case: Step, dtype: torch.dtype) -> None:
    args, shape = made(case, dtype, DEVICE)
    due = in_float64(args, shape)
    plain, mine = ([one.clone() for one in args] for _ in range(2))
    outputs = [
        (run(*given, shape), *(new_of(case, one) for one in given[4:]))
        for run, given in ((reference_, plain), (op, mine))
    ]
    for index, exact in enumerate(due):
        errors = [(out[index].double().cpu() - exact).abs().max().item() for out in outputs]
        least = torch.finfo(dtype).eps * exact.abs().max().item()
        assert errors[1] <= 2 * errors[0] + least, (index, errors)
    for before, after in zip(args, mine, strict=True):  # nothing else was written to
        if before.dim() == 4:
            after = after.clone()
            for row, slot in enumerate(case.slots):
                new = slice(slot, slot + case.tokens)
                after[row, :, new] = before[row, :, new]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def alone(op: Any, args: tuple[Tensor, ...], shape: AttentionShape, row: int, padding: int) -> tuple[Tensor, ...]:
    """What a row gets token by token, without the other rows, its padding, and most of the room behind it."""
    qkv, positions, slot, mask, keys, values = args
    tokens, first = positions.shape[1], int(slot[row]) - padding
    rest = (mask[row : row + 1, padding:], keys[row : row + 1, :, padding:], values[row : row + 1, :, padding:])
    mask, keys, values = (one[..., : first + tokens, :].clone() if one.dim() == 4 else one[:, : first + tokens].clone()
                          for one in rest)  # fmt: skip
    found = []
    for token in range(tokens):
        at, own = torch.full_like(slot[:1], first + token), row * tokens + token
        found.append(
            op(qkv[own : own + 1], positions[row : row + 1, token : token + 1].clone(), at, mask, keys, values, shape)
        )
        mask[:, first + token] = 1
    return torch.cat(found), keys[:, :, first:], values[:, :, first:]


def assert_the_same_bits(op: Any, case: Step, dtype: torch.dtype) -> None:
    args, shape = made(case, dtype, DEVICE)
    mine = tuple(one.clone() for one in args)
    y = op(*mine, shape).view(case.rows, case.tokens, -1)
    for row in range(case.rows):
        padding = case.padding if row == case.rows - 1 else 0
        due = alone(op, args, shape, row, padding)
        found = (y[row], *(new_of(case, one)[row : row + 1] for one in mine[4:]))
        for one, other in zip(found, due, strict=True):
            assert torch.equal(bits(one), bits(other)), (row, (one - other).abs().max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_cpu(case: Step) -> None:
    (qkv, *rest), shape = made(case, torch.float64, DEVICE)
    due = in_float64((qkv, *rest), shape)
    if DEVICE.type == "cpu":
        y = decode_attention.decode_attention_(qkv, *rest, shape)
        torch.testing.assert_close(y, due[0], rtol=1e-4, atol=1e-4)  # angles are float32


@needs_triton
@pytest.mark.skipif(HERE, reason="the test below runs as it is")
def test_through_the_interpreter() -> None:
    interpret(__file__, "-k", "triton_kernel")


@needs_triton
@here
@pytest.mark.parametrize("dtype", [LOW, torch.float32], ids=["low", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_triton_kernel(case: Step, dtype: torch.dtype) -> None:
    from accelpatch.kernels.triton import decode_attention as kernel

    if not INTERPRETED and (reason := decode_attention.why_not(made(case, dtype, DEVICE)[1], dtype, probe(DEVICE))):
        pytest.skip(reason)
    assert_float_rule(kernel.decode_attention_, case, dtype)


SAME = {
    "grouped": Step(tokens=8),
    "one-to-one": Step(heads=2, tokens=5, size=128, slot=60, rows=3, padding=13),
    "three-tiles": Step(heads=7, kv_heads=1, tokens=6, norms=True, softcap=3.0),
    "in-two-runs": Step(tokens=8, slot=510, capacity=1024, padding=3, rows=1),
    "end-of-the-first-run": Step(tokens=8, slot=252, capacity=512, padding=141, size=80),
    "window": Step(tokens=8, slot=700, capacity=1024, window=180, rotary_dim=16),
    "sinks": Step(tokens=4, heads=8, slot=510, capacity=1024, window=128, sinks=True),
}


def _gemm(a: Any, b: Any, dtype: Any) -> Any:
    """a @ b, each number by itself."""
    return (a.astype(dtype)[:, None, :] * b.astype(dtype).T[None]).sum(-1)


@pytest.fixture
def _rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix instructions give a row the same in any place; the interpreter's product, numpy's, does not."""
    if INTERPRETED:
        monkeypatch.setattr(numpy, "matmul", _gemm)


@needs_triton
@here
@pytest.mark.gpu
@pytest.mark.usefixtures("_rows_apart")
@pytest.mark.parametrize("processors", [1, 2, 132])
@pytest.mark.parametrize("case", SAME.values(), ids=SAME)
def test_the_triton_kernel_gives_a_token_the_bits_that_it_gets_alone(
    case: Step, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelpatch.kernels.triton import decode_attention as kernel

    monkeypatch.setattr(launch, "processors", lambda device: processors)  # what one program has of a head
    assert_the_same_bits(kernel.decode_attention_, case, LOW)
