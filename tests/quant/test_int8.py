"""int8 weights: exact on the grid, half a step off it, and the numbers that break a naive quantiser."""

from __future__ import annotations

import pytest
import torch

from accelpatch.errors import KernelError
from accelpatch.quant import int8
from accelpatch.quant.formats import dequantize
from accelpatch.quant.weight import check_finite
from tests.support.parity import name, strided, transposed


def weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("group_size", [None, 13, 1], ids=["row", "13", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=name)
def test_error_is_half_a_step(dtype: torch.dtype, group_size: int | None) -> None:
    w = weight(7, 65, dtype)
    packed = int8.quantize(w, group_size=group_size)
    groups = 1 if group_size is None else 65 // group_size
    assert (packed.w.dtype, packed.w.shape) == (torch.int8, (7, 65))
    assert (packed.scale.dtype, packed.scale.shape) == (torch.float32, (7, groups))
    step = packed.scale.repeat_interleave(65 // groups, dim=1)
    assert bool(((dequantize(packed) - w.float()).abs() <= 0.5001 * step).all())


@pytest.mark.parametrize("scale", [2.0**-10, 3.0, 2.0**-120, 2.0**100], ids=["small", "three", "tiny", "huge"])
@pytest.mark.parametrize("group_size", [None, 32], ids=["row", "32"])
def test_exact_on_grid_points(scale: float, group_size: int | None) -> None:
    u = torch.randint(-127, 128, (5, 64), generator=torch.Generator().manual_seed(0))
    u[:, ::32] = 127
    packed = int8.quantize(u * scale, group_size=group_size)
    assert torch.equal(packed.w, u.to(torch.int8))
    assert torch.equal(dequantize(packed), u * scale)


def test_negation_is_symmetric() -> None:
    w = weight(3, 64)
    assert torch.equal(int8.quantize(w).w, -int8.quantize(-w).w)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3.4e38, -65504.0], ids=str)
def test_extreme_rows_stay_finite(value: float) -> None:
    w = torch.full((2, 6), value)
    w[1] = 0
    back = dequantize(int8.quantize(w))
    assert bool(torch.isfinite(back).all())
    assert bool(((back - w).abs() <= 2e-43 + w.abs() * 2.0**-22).all())
    assert torch.equal(back[1], w[1])


@pytest.mark.parametrize("view", [strided, transposed], ids=["strided", "transposed"])
def test_views_give_the_same(view: object) -> None:
    w = weight(9, 64)
    one, other = int8.quantize(w, group_size=32), int8.quantize(view(w), group_size=32)
    assert torch.equal(one.w, other.w)
    assert torch.equal(one.scale, other.scale)
    assert other.w.is_contiguous()
    assert other.scale.is_contiguous()


def test_input_is_left_alone() -> None:
    w = torch.nn.Parameter(weight(3, 64))
    before = w.detach().clone()
    packed = int8.quantize(w)
    assert torch.equal(w, before)
    assert not packed.scale.requires_grad


@pytest.mark.parametrize(
    "bad, group_size, message",
    [
        (torch.zeros(3, 65), 32, "group_size 32 does not divide K = 65"),
        (torch.zeros(3, 64), 0, "group_size 0"),
        (torch.zeros(3, 64, 2), None, "float weight"),
        (torch.zeros(3, 64, dtype=torch.int8), None, "float weight"),
        (torch.zeros(0, 64), None, "float weight"),
    ],
    ids=["groups", "zero", "three-dimensions", "integer", "empty"],
)
def test_refused(bad: torch.Tensor, group_size: int | None, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        int8.quantize(bad, group_size=group_size)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_not_finite_names_the_place(value: float) -> None:
    w = weight(3, 64)
    w[1, 5] = value
    with pytest.raises(KernelError, match=r"^weight\[1, 5\] is .*1 of 192 values"):
        check_finite(w)
    with pytest.raises(KernelError, match=r"weight\[1, 5\]"):
        int8.quantize(w)
    check_finite(weight(3, 64))
