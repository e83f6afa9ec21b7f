"""Attention of a few queries by the native CPU kernel, beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch import device as devices
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.ops.attention.on_cpu import by_cpu

CPU = devices.probe("cpu")
pytestmark = pytest.mark.skipif(native_library.why_not(CPU) is not None, reason="needs a C++ compiler")
SHAPES = {"one": (1, 4, 2, 1, 64), "rows": (3, 3, 3, 1, 80), "several": (2, 8, 1, 5, 96), "eight": (1, 4, 4, 8, 128)}


def made(batch: int, heads: int, kv_heads: int, length: int, size: int, keys: int = 521) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((batch, heads, length, size), *((batch, kv_heads, keys, size),) * 2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(args: tuple[Any, ...]) -> Tensor:
    y = by_cpu(*args)
    assert y.is_contiguous()
    (found,) = parity.check(flash_attention.OP, args, [y])
    assert found.ok, found
    return y


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("call", [{}, {"causal": False}, {"window": 70}, {"softcap": 3.0}, {"sinks": True}], ids=str)
def test_the_float_rule(shape: tuple[int, ...], call: dict[str, Any]) -> None:
    sinks = torch.linspace(-3, 6, shape[1]) if call.get("sinks") else None
    rest = (None, None, sinks, call.get("causal", True), call.get("window", 0), call.get("softcap", 0.0), 0.2)
    check((*made(*shape), *rest))


@pytest.mark.parametrize("window", [0, 5])
def test_ranges_and_queries_that_see_nothing(window: int) -> None:
    q, k, v = made(2, 4, 2, 3, 64)
    ranges = torch.tensor([[[3, 9], [0, 521], [7, 7]], [[500, 521], [4, 2], [520, 521]]], dtype=torch.int32)
    for one in (k, v):  # what nobody sees
        one[1, :, 300:400] = float("nan")
    y = check((q, k, v, ranges, None, None, True, window, 0.0, 0.2))
    assert torch.equal(y[0, 2], torch.zeros(4, 64))
    assert torch.equal(y[1, 1], torch.zeros(4, 64))


def test_slots_of_a_cache_and_other_strides() -> None:
    q, k, v = made(2, 4, 2, 1, 64, keys=600)
    plain = check((q, k[:, :, :550], v[:, :, :550], None, None, None, True, 0, 0.0, 0.2))
    spread = [one.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :550] for one in (k, v)]
    assert torch.equal(check((q, *spread, None, None, None, True, 0, 0.0, 0.2)), plain)


def test_it_is_chosen_for_a_step_over_many_keys() -> None:
    ran = dispatch.calls["flash_attention", "cpu"]
    flash_attention.flash_attention(*made(1, 16, 2, 2, 64), None, None, None, True, 0, 0.0, 0.2)
    assert dispatch.calls["flash_attention", "cpu"] == ran + 1


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"dtype": torch.bfloat16}, "takes float32"),
        ({"length": 9}, "1 to 8 queries"),
        ({"heads": 130, "kv_heads": 2}, "64 query heads"),
        ({"bias": torch.bool}, "takes no bias"),
    ],
    ids=str,
)
def test_limits_are_reasons(options: dict[str, Any], reason: str) -> None:
    given = {
        "heads": 4,
        "kv_heads": 2,
        "size": 128,
        "dtype": torch.float32,
        "length": 1,
        "keys": 2048,
    } | options
    assert reason in str(dispatch.why_not(flash_attention.OP, "cpu", flash_attention.of_shape(**given), CPU))
    assert "runs on a CPU" in str(
        dispatch.why_not(flash_attention.OP, "cpu", flash_attention.of_shape(**given), devices.KNOWN["sm_90"])
    )
