"""A prompt's attention: each token against decode_attention's reference one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.attention.prompt_attention import prompt_attention_, rotate_reference_, shown
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, LOW, here, interpret, needs_triton

START = 3  # first slot of the cache that the kernel writes
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "no-groups": {"heads": 3, "kv_heads": 3, "size": 80},
    "one-group": {"heads": 7, "kv_heads": 1, "size": 128},
    "norms": {"norms": True, "size": 96},
    "small": {"size": 16},
    "partly-rotated": {"rotary": 24, "size": 96},
    "gemma": {"norms": True, "plus_one": True, "softcap": 3.0},
    "all": {"norms": True, "plus_one": True, "softcap": 3.0, "rotary": 16},
}


def made(
    dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, size: int = 64, norms: bool = False, window: int = 0,
    batch: int = 2, length: int = 13, capacity: int = 32, rotary: int | None = None, plus_one: bool = False,
    softcap: float = 0.0,
) -> tuple[tuple[Tensor, ...], AttentionShape]:  # fmt: skip
    """qkv, positions, keys and values (poisoned), and the shape."""
    generator = torch.Generator().manual_seed(3)
    weights = [(torch.rand(size, generator=generator) + 0.5).to(DEVICE, dtype) if norms else None for _ in range(2)]
    frequencies = (10000 ** (-torch.arange(0, rotary or size, 2) / size)).to(DEVICE)
    shape = AttentionShape(
        heads, kv_heads, size, size**-0.5, frequencies, 1.25, window, *weights, 1e-6, softcap, plus_one
    )
    qkv = torch.randn(batch * length, shape.columns, generator=generator).to(DEVICE, dtype)
    positions = (torch.arange(length) + torch.arange(batch)[:, None]).to(DEVICE)
    cache = [torch.full((batch, kv_heads, capacity, size), float("nan"), device=DEVICE, dtype=dtype) for _ in range(2)]
    return (qkv, positions, *cache), shape


@needs_triton
@pytest.mark.skipif(HERE, reason="the test below runs as it is")
def test_through_the_interpreter() -> None:
    interpret(__file__, "-k", "triton")


@needs_triton
@here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [LOW, torch.float32], ids=["low", "float32"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_triton_kernel(changes: dict[str, Any], dtype: torch.dtype) -> None:
    from accelpatch.kernels.triton.prompt_attention import rotate_

    args, shape = made(dtype, **changes)
    args = (*args[:2], *(one[:, :, START:] for one in args[2:]))
    plain, mine, exact = (_copied(args) for _ in range(3))
    exact = [one.double() if one.is_floating_point() else one for one in exact]
    rotate_reference_(*plain, shape)
    rotate_(*mine, shape)
    rotate_reference_(*exact, shape)
    for own, got, due, before in zip(plain, mine, exact, args, strict=True):
        assert torch.equal(got.isnan(), due.isnan())  # every slot behind the prompt is as it was
        if got.is_floating_point():
            errors = [(one.double() - due).abs().nan_to_num().max().item() for one in (own, got)]
            assert errors[1] <= 2 * errors[0] + torch.finfo(dtype).eps * due.abs().nan_to_num().max().item(), errors
        else:
            assert torch.equal(got, before)
    columns = (shape.heads + shape.kv_heads) * shape.size
    assert torch.equal(mine[0][:, shape.heads * shape.size :], args[0][:, shape.heads * shape.size :])
    rows = args[0][:, columns:].view(*args[1].shape, shape.kv_heads, shape.size).transpose(1, 2)
    assert torch.equal(mine[3][:, :, : args[1].shape[1]], rows)


def _copied(args: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies; of the slots of a cache views of a copy of the whole, so that capacity and strides stay."""
    return [one.clone() if one.dim() < 4 else one._base.clone()[:, :, START:] for one in args]  # type: ignore[union-attr]


PADDINGS = {"no-padding": (), "left": range(4), "right": range(9, 13), "hole": (2, 3, 7)}


@pytest.mark.parametrize("changes", [*SHAPES.values(), {"window": 5}], ids=[*SHAPES, "window"])
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("chunk", [13, 5], ids=["whole", "chunks"])
def test_each_token_is_that_of_a_step(changes: dict[str, Any], padding: Any, chunk: int) -> None:
    if INTERPRETED:
        pytest.skip("the plain form runs without the interpreter too")
    on_gpu = DEVICE.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    (qkv, positions, keys, values), shape = made(dtype, **changes)
    batch, length = positions.shape
    mask = torch.ones(batch, keys.shape[2], dtype=torch.int64, device=DEVICE)
    mask[1, list(padding)] = 0
    held = [torch.zeros_like(one) for one in (keys, values)]
    due = []
    for place in range(length):
        rows, slot = qkv.view(batch, length, -1)[:, place].contiguous(), torch.tensor([place], device=DEVICE)
        due.append(decode_attention.reference_(rows, positions[:, place : place + 1], slot, mask, *held, shape))
    given, parts = mask[:, :length] if padding else None, []
    for start in range(0, length, chunk):
        part = slice(start, min(start + chunk, length))
        rows = qkv.view(batch, length, -1)[:, part].flatten(0, 1).clone()
        seen = shown(given, start, part.stop - start, shape.window)
        y = prompt_attention_(rows, positions[:, part].contiguous(), seen, keys, values, shape, start)
        parts.append(y.view(batch, part.stop - start, -1))
    y = torch.cat(parts, 1)
    near = {"rtol": 2e-2, "atol": 2e-2} if on_gpu else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip((keys, values), held, strict=True):
        torch.testing.assert_close(one[:, :, :length], other[:, :, :length], **near)
    kept = mask[:, :length].bool()
    torch.testing.assert_close(y[kept], torch.stack(due, 1)[kept], **near)
    assert bool(y.isfinite().all())
