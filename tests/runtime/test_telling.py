"""Which products tell the next kernel of their columns, and of how many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.kernels import cpu_native
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.fused_product import Product
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import Told
from accelpatch.kernels.int4_tiles import pair, tile
from accelpatch.quant import int4
from accelpatch.runtime import captured_graph, fused_layer
from accelpatch.runtime.adapters import Adapted
from accelpatch.runtime.captured_graph import EagerGraph
from accelpatch.runtime.patched_model import RUNTIME
from accelpatch.runtime.telling import telling_attention, telling_down
from tests.families.tiny import CAUSAL


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


def test_a_step_that_breaks_off_leaves_nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(captured_graph.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(cpu_native, "why_not", lambda device: "not in this test")
    model: Any = accelpatch.patch(CAUSAL["llama"].make(intermediate_size=4224), "exact", verify=False)
    model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
    layers = vars(model)[RUNTIME]._fused.layers

    def broken(*args: Any) -> None:
        layers[0].qkv.tells.number[0] += 64
        layers[1].gate_up.tells.number[0] += 4096
        raise KeyboardInterrupt

    monkeypatch.setattr(fused_layer, "decode_attention_", broken)
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=2)  # another step, whose warm-up breaks off
    assert not any(int(one.tells.number.abs().sum()) for layer in layers for one in (layer.qkv, layer.gate_up))
