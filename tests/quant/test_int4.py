"""4-bit weights: packing, exact on the grid, bounded off it, constant groups, and the range of float16."""

from __future__ import annotations

import pytest
import torch

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.quant import int4
from accelpatch.quant.formats import dequantize
from tests.support.parity import name, strided, transposed

SYMMETRIC = pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])


def weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_low_nibble_is_even_k() -> None:
    assert int4.pack(torch.tensor([[1, 2, 15, 8]])).view(torch.uint8).tolist() == [[0x21, 0x8F]]


def test_pack_and_unpack_are_inverse() -> None:
    q = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).reshape(4, 64)
    u = int4.unpack(q)
    assert (int(u.min()), int(u.max()), u.shape) == (0, 15, (4, 128))
    assert torch.equal(int4.pack(u), q)


@SYMMETRIC
@pytest.mark.parametrize("group_size", [128, 32, 2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
def test_error_is_bounded_by_the_step(dtype: torch.dtype, group_size: int, symmetric: bool) -> None:
    w = weight(7, 128, dtype)
    packed = int4.quantize(w, group_size=group_size, symmetric=symmetric)
    assert (packed.w.dtype, packed.w.shape) == (torch.int8, (7, 64))
    assert (packed.scale.dtype, packed.scale.shape) == (torch.float16, (7, 128 // group_size))
    assert (packed.offset is None) == symmetric
    step = packed.scale.float().abs().repeat_interleave(group_size, dim=1)
    # symmetric: the value opposite to the extreme can be a whole step outside of -8..7
    allowed = (1.0 if symmetric else 0.5) * step + w.float().abs() * 2.0**-9
    assert bool(((dequantize(packed) - w.float()).abs() <= allowed).all())


@pytest.mark.parametrize("step, low", [(2.0**-6, -0.25), (0.375, 100.0), (2.0**-12, 0.0)], ids=str)
def test_asymmetric_is_exact_on_grid_points(step: float, low: float) -> None:
    u = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0))
    u[:, ::32], u[:, 1::32] = 0, 15
    packed = int4.quantize(u * step + low, group_size=32)
    assert torch.equal(int4.unpack(packed.w), u.to(torch.int8))
    assert torch.equal(dequantize(packed), u * step + low)


@pytest.mark.parametrize("step", [2.0**-6, -0.375], ids=str)
def test_symmetric_is_exact_on_grid_points(step: float) -> None:
    u = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0))
    u[:, ::32] = 0
    packed = int4.quantize((u - 8) * step, group_size=32, symmetric=True)
    assert torch.equal(dequantize(packed), (u - 8) * step)


@SYMMETRIC
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.7, 0.0123, 3e4], ids=str)
def test_constant_groups_are_exact(value: float, dtype: torch.dtype, symmetric: bool) -> None:
    w = torch.cat((torch.full((3, 32), value), weight(3, 32)), dim=1).to(dtype)
    back = dequantize(int4.quantize(w, group_size=32, symmetric=symmetric), dtype)
    assert torch.equal(back[:, :32], w[:, :32])


@SYMMETRIC
@pytest.mark.parametrize("size", [1e-7, 1e-30, 1e6, 1e37], ids=str)
def test_scales_outside_of_float16_are_float32(size: float, symmetric: bool) -> None:
    w = weight(3, 64) * size
    packed = int4.quantize(w, group_size=32, symmetric=symmetric)
    assert packed.scale.dtype == torch.float32
    assert packed.offset is None or packed.offset.dtype == torch.float32
    step = packed.scale.abs().repeat_interleave(32, dim=1)
    assert bool(((dequantize(packed) - w).abs() <= 1.001 * step).all())


@SYMMETRIC
@pytest.mark.parametrize("value", [1e-45, 3.4e38], ids=str)
def test_extremes_stay_finite(value: float, symmetric: bool) -> None:
    w = torch.full((2, 32), value)
    w[:, 1::2] = 0
    w[1] = 0
    back = dequantize(int4.quantize(w, group_size=32, symmetric=symmetric))
    assert bool(torch.isfinite(back).all())
    assert torch.equal(back[1], w[1])


def test_narrow_group_far_from_zero_keeps_its_range() -> None:
    """The minimum is rounded to float16 first, and the scale then reaches from there to the maximum."""
    w = 1 + torch.linspace(0, 1e-3, 32)[None]
    error = (dequantize(int4.quantize(w, group_size=32)) - w).abs().max()
    assert float(error) < 2.0**-11


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32], ids=name)
def test_integer_zero_points_dequantise(dtype: torch.dtype) -> None:
    u = torch.randint(0, 16, (3, 64), generator=torch.Generator().manual_seed(0))
    scale, zero = torch.tensor([[0.5], [2.0], [0.25]]), torch.tensor([[0], [7], [15]], dtype=dtype)
    assert torch.equal(dequantize(Int4Rows(int4.pack(u), scale, zero)), (u - zero) * scale)


@SYMMETRIC
@pytest.mark.parametrize("view", [strided, transposed], ids=["strided", "transposed"])
def test_views_give_the_same(view: object, symmetric: bool) -> None:
    w = weight(9, 64)
    one = int4.quantize(w, group_size=32, symmetric=symmetric)
    other = int4.quantize(view(w), group_size=32, symmetric=symmetric)
    assert torch.equal(dequantize(one), dequantize(other))
    assert all(tensor.is_contiguous() for tensor in other.tensors().values())


@pytest.mark.parametrize(
    "bad, group_size, message",
    [
        (torch.zeros(3, 65), 13, "K = 65 is odd"),
        (torch.zeros(3, 64), 48, "group_size 48 does not divide K = 64"),
        (torch.zeros(64), 32, "float weight"),
        (torch.full((2, 64), float("nan")), 32, "nan"),
        (torch.tensor([[3e38, -3e38]]), 2, "further apart than a float32"),
    ],
    ids=["odd", "groups", "one-dimension", "nan", "spread"],
)
def test_refused(bad: torch.Tensor, group_size: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        int4.quantize(bad, group_size=group_size)
