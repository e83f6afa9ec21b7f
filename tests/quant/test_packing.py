"""Weights in the words of other formats: integer zero points, cut groups, sorted columns, scales of nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.quant import int4, int8, packing
from accelpatch.quant.formats import dequantize

N, K = 16, 64


def weight(group_size: int = 32) -> Int4Rows:
    """A symmetric 4-bit weight; half of its scales are negative."""
    made = int4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(2)), group_size=group_size,
                         symmetric=True)  # fmt: skip
    assert 0 < int((made.scale < 0).sum()) < made.scale.numel()
    return made


def numbers(made: packing.Coded) -> Tensor:
    """w[N, K] by the formula."""
    size = K // made.scale.shape[1]
    groups = torch.arange(K) // size if made.groups is None else made.groups.long()
    zero, scale = made.zeros.float()[:, groups], made.scale.float()[:, groups]
    return (made.codes.float() - zero) * scale


@pytest.mark.parametrize("size", [32, 16, 8], ids=str)
def test_cut_groups_are_the_same_weight(size: int) -> None:
    made = packing.coded(weight(), size)
    assert made.scale.shape == (N, K // size)
    assert torch.equal(numbers(made), dequantize(weight()))


def test_eight_bits_are_the_same_weight() -> None:
    held = int8.quantize(torch.randn(N, K), group_size=32)
    assert torch.equal(numbers(packing.coded(held, 32)), dequantize(held))


def test_sorted_columns_go_back_to_their_inputs() -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    made = packing.coded(weight().replace(order=order), 16)
    assert made.groups is not None
    assert made.groups.bincount().tolist() == [16] * 4
    due = torch.empty(N, K)
    due[:, order.long()] = dequantize(weight())  # column c is input order[c]
    assert torch.equal(numbers(made), due)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_float_minima_of_whole_steps_are_zero_points(dtype: torch.dtype) -> None:
    zero = torch.arange(N * 2).view(N, 2) % 16
    scale = weight().scale.to(dtype)
    found = packing.zero_points(scale, -zero.float() * scale.float())
    assert found is not None
    assert found.tolist() == zero.tolist()
    assert torch.equal(found, packing.zero_points(scale, zero.to(torch.int8)))  # type: ignore[arg-type]


def test_other_minima_are_refused() -> None:
    scale = weight().scale
    minimum = -3 * scale.float()
    minimum[5, 1] *= 1 + 2**-20
    with pytest.raises(KernelError, match=r"symmetric: true"):
        packing.zero_points(scale, minimum)
    with pytest.raises(KernelError, match="float minima"):
        packing.zero_points(scale, -16 * scale.float())
    with pytest.raises(KernelError, match="from 0 to 16"):
        packing.zero_points(scale, torch.tensor([0, 16], dtype=torch.int8))


@pytest.mark.parametrize(
    ("offset", "due"),
    [
        pytest.param(None, False, id="symmetric"),
        pytest.param(torch.full((N, 2), 8, dtype=torch.int8), False, id="the middle"),
        pytest.param(torch.full((N, 2), 7, dtype=torch.int8), True, id="another"),
    ],
)
def test_zero_points_in_the_middle_are_none(offset: Any, due: bool) -> None:
    assert packing.has_zero_points(weight().scale, offset) is due


@pytest.mark.parametrize("bits", [4, 8], ids=str)
def test_a_group_of_nothing_gets_a_scale(bits: int) -> None:
    full = torch.randn(N, K)
    full[3, 32:] = 0
    held = int4.quantize(full, group_size=32, symmetric=True) if bits == 4 else int8.quantize(full, group_size=32)
    made = packing.coded(held, 32)
    assert bool((made.scale != 0).all())
    assert torch.equal(numbers(made), dequantize(held))
    row = packing.rows(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2, 1), None, torch.float32)
    assert row["weight_scale"].tolist() == [[1.0], [1.0]]


def test_scales_take_the_models_dtype_where_it_holds_them() -> None:
    q = torch.ones(2, 4, dtype=torch.int8)
    assert packing.rows(q, torch.tensor([[0.5], [0.25]]), None, torch.bfloat16)["weight_scale"].dtype == torch.bfloat16
    fine = torch.tensor([[0.5], [1 / 3]])
    assert torch.equal(packing.rows(q, fine, None, torch.bfloat16)["weight_scale"], fine)


@pytest.mark.parametrize("value", [1e5, 1e-9], ids=str)
def test_what_float16_cannot_hold_is_refused(value: float) -> None:
    assert packing.half(torch.tensor([[0.0, -0.5]])).tolist() == [[0.0, -0.5]]
    with pytest.raises(KernelError, match="float16"):
        packing.half(torch.tensor([[1.0, value]]))


def test_words_have_the_low_field_first_and_zero_behind_the_end() -> None:
    assert packing.packed(torch.tensor([[1, 2, 15]], dtype=torch.uint8), 4).tolist() == [[0xF21]]
    top = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 15]], dtype=torch.uint8)
    assert packing.packed(top, 4).tolist() == [[0xF0000000 - 2**32]]
    assert packing.packed(torch.tensor([[1, 255]], dtype=torch.uint8), 8).tolist() == [[0xFF01]]


def test_gptqs_first_version_is_less_one_in_whole_words() -> None:
    zero = torch.zeros(8, 1, dtype=torch.uint8)
    zero[1] = 3
    made = packing.Coded(4, torch.zeros(8, 8, dtype=torch.uint8), torch.ones(8, 1), zero)
    assert packing.gptq(made, False)["qzeros"].tolist() == [[0x30]]
    assert packing.gptq(made, True)["qzeros"].tolist() == [[0x30 - 0x11111111]]
