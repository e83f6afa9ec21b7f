"""Which products tell the next kernel of their columns, and of how many."""

from __future__ import annotations

import pytest
import torch

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.fused_product import Product
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import Told
from accelpatch.kernels.int4_tiles import pair, tile
from accelpatch.quant import int4
from accelpatch.runtime.adapters import Adapted
from accelpatch.runtime.telling import telling_attention, telling_down


def product(n: int, k: int) -> Product:
    return Product(torch.zeros(n, k))


def shape(heads: int, kv_heads: int, size: int) -> AttentionShape:
    return AttentionShape(heads, kv_heads, size, 1.0, torch.ones(size // 2), 1.0)


@pytest.mark.parametrize("heads, kv_heads, size, columns", [(4, 4, 16, 128), (6, 2, 8, 64), (3, 1, 8, 32)])
def test_attention_hears_of_q_and_k(heads: int, kv_heads: int, size: int, columns: int) -> None:
    told = telling_attention(product((heads + 2 * kv_heads) * size, 64), shape(heads, kv_heads, size), torch.float32)
    assert isinstance(told, Product)
    assert told.tells is not None
    assert (told.tells.columns, told.tells.number.tolist()) == (columns, [0, 0])


def test_attention_hears_nothing_of_parts_of_a_tile_or_of_adapters() -> None:
    odd = product(8 * (2 + 2), 64)
    assert telling_attention(odd, shape(2, 1, 8), torch.float32) is odd  # 24 columns of q and k
    adapted = Adapted(product(128, 64), product(8, 64), product(128, 8))
    assert telling_attention(adapted, shape(4, 2, 16), torch.float32) is adapted


@pytest.mark.parametrize("middle, columns", [(4096, None), (4097, 4096), (11008, 8192), (14336, 12288)])
def test_down_hears_of_all_but_the_last_of_its_parts(middle: int, columns: int | None) -> None:
    gate_up, down = telling_down(product(2 * middle, 8), product(8, middle), "silu")
    assert isinstance(gate_up, Product)
    assert isinstance(down, Product)
    assert gate_up.tells is down.hears
    assert (None if down.hears is None else down.hears.columns) == columns


def test_down_hears_nothing_where_the_gate_is_a_launch_of_its_own() -> None:
    both = product(2 * 5000, 8), product(8, 5000)
    assert telling_down(*both, "gelu") == both
    weight = tile(*int4.quantize(torch.randn(2 * 4608, 32), group_size=32))
    unpaired = Product(weight), product(8, 4608)
    assert telling_down(*unpaired, "silu") == unpaired
    told, _ = telling_down(Product(pair(weight)), product(8, 4608), "silu")
    assert isinstance(told, Product)
    assert told.tells is not None


def test_nothing_is_told_while_weights_may_still_be_written() -> None:
    told = Told(torch.zeros(2, dtype=torch.int32), 32)
    assert binding.told_arguments(told, "tells") == {}
    with binding.settled_weights():
        assert binding.told_arguments(told, "tells") == {"tells": told.number.data_ptr(), "tell_columns": 32}
        assert binding.told_arguments(None, "hears") == {}
