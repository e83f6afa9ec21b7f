"""Which products signal their columns to the next kernel, of how many, and where they make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.fusion import fused_layer
from accelpatch.fusion.fused_layer import FusedLayer
from accelpatch.fusion.signals import consumed_by_attention, consumed_by_down, with_signals
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import SENTINEL, Signal
from accelpatch.kernels.hip.low_rank import LowRank
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.quant import int4
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiny import CAUSAL


def product(n: int, k: int) -> FusedLinear:
    return FusedLinear(Plain(torch.zeros(n, k)))


def shape(heads: int, kv_heads: int, size: int) -> AttentionShape:
    return AttentionShape(heads, kv_heads, size, 1.0, torch.ones(size // 2), 1.0)


@pytest.mark.parametrize("heads, kv_heads, size, columns", [(4, 4, 16, 128), (6, 2, 8, 64), (3, 1, 8, 32)])
def test_attention_waits_for_q_and_k(heads: int, kv_heads: int, size: int, columns: int) -> None:
    qkv = product((heads + 2 * kv_heads) * size, 64)
    assert consumed_by_attention(qkv, shape(heads, kv_heads, size), torch.float32) == columns


def test_attention_does_not_wait_for_parts_of_a_tile_or_of_adapters() -> None:
    assert consumed_by_attention(product(8 * (2 + 2), 64), shape(2, 1, 8), torch.float32) == 0  # 24 columns of q and k
    adapted = AdaptedLinear(product(128, 64), LowRank(torch.zeros(8, 64), torch.zeros(128, 8)))
    assert consumed_by_attention(adapted, shape(4, 2, 16), torch.float32) == 0


@pytest.mark.parametrize("middle, columns", [(4096, 0), (4097, 4096), (11008, 8192), (14336, 12288)])
def test_down_waits_for_all_but_the_last_of_its_parts(middle: int, columns: int) -> None:
    assert consumed_by_down(product(2 * middle, 8), product(8, middle), "silu") == columns


def test_down_does_not_start_early_where_it_quantises_its_input() -> None:
    """The scale of a row is known when all of the row is."""
    down = FusedLinear(W8A8Rows(torch.zeros(8, 11008, dtype=torch.int8), torch.ones(8, 1)))
    assert consumed_by_down(product(2 * 11008, 8), down, "silu") == 0
    gate_up = FusedLinear(W8A8Rows(torch.zeros(2 * 11008, 8, dtype=torch.int8), torch.ones(2 * 11008, 1)))
    assert consumed_by_down(gate_up, product(8, 11008), "silu") == 8192


def test_down_does_not_wait_where_the_gate_is_a_launch_of_its_own() -> None:
    assert consumed_by_down(product(2 * 5000, 8), product(8, 5000), "gelu") == 0
    weight = Tiles.of(int4.quantize(torch.randn(2 * 4608, 32), group_size=32))
    assert consumed_by_down(FusedLinear(weight), product(8, 4608), "silu") == 0
    assert consumed_by_down(FusedLinear(weight.pair()), product(8, 4608), "silu") == 4096


def layer(middle: int) -> FusedLayer:
    attention, gain = shape(4, 2, 16), FusedNorm(torch.ones(64), 1e-6)
    return FusedLayer(
        product(128, 64), gain, attention, product(64, 64), product(2 * middle, 64), gain, "silu", product(64, middle)
    )


def test_each_layer_has_two_numbers_and_words_of_its_own() -> None:
    layers, sentinels = with_signals([layer(4100), layer(4096), layer(4105)], torch.float32, torch.device("cpu"))
    assert [one.attention_signal.columns for one in layers] == [96, 96, 96]
    assert layers[0].gate_up.producer is layers[0].down.consumer
    assert layers[0].gate_up.producer.number is not layers[0].qkv.producer.number
    assert layers[1].gate_up.producer is layers[1].down.consumer is None
    signals = [signal for one in layers for signal in (one.qkv.producer, one.gate_up.producer) if signal is not None]
    assert [len(one.words) for one in signals] == [128, 4100, 128, 128, 4105]
    for number, one in enumerate(signals):
        one.words.fill_(number)
    assert [one.words.unique().tolist() for one in signals] == [[0], [1], [2], [3], [4]]
    assert not any(one.words.data_ptr() % 16 for one in signals)
    sentinels.reset(2)
    assert sentinels.words.unique().tolist() == [SENTINEL, 0, 1, 2, 3, 4]
    sentinels.reset(1)
    assert sentinels.words.unique().tolist() == [SENTINEL]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_lone_row_is_made_where_its_reader_looks_for_what_is_blank(rows: int) -> None:
    words, made = torch.full((48,), SENTINEL, dtype=torch.int16), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "_start", lambda weight, args, x: made.append(args.y))
        weight = WeightArguments("gemv", 48, 16, torch.zeros(48, 16, dtype=torch.bfloat16))
        signal = Signal(torch.zeros(2, dtype=torch.int32), 32, words)
        y = binding.launch(weight, torch.zeros(1, rows, 16, dtype=torch.bfloat16), producer=signal)
    assert y.shape == (1, rows, 48)
    assert made == [y.data_ptr()]
    assert (y.data_ptr() == words.data_ptr()) == (rows == 1)


def test_nothing_is_signalled_while_weights_may_still_be_written() -> None:
    signal = Signal(torch.zeros(2, dtype=torch.int32), 32, torch.zeros(64, dtype=torch.int16))
    assert binding.signal_arguments(signal, "producer") == {}
    with binding.weight_prefetch():
        assert binding.signal_arguments(signal, "producer") == {
            "producer": signal.number.data_ptr(),
            "producer_columns": 32,
        }
        assert binding.signal_arguments(None, "consumer") == {}


def test_a_step_that_breaks_off_leaves_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    model: Any = accelpatch.patch(CAUSAL["llama"].make(intermediate_size=4224), "exact", verify=False)
    model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
    layers = vars(model)[RUNTIME].captured.fused.layers

    def broken(*args: Any) -> None:
        layers[0].qkv.producer.number[0] += 64
        layers[1].gate_up.producer.number[0] += 4096
        raise KeyboardInterrupt

    monkeypatch.setattr(fused_layer, "decode_attention_", broken)
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=2)  # another step, whose warm-up breaks off
    assert not any(int(one.producer.number.abs().sum()) for layer in layers for one in (layer.qkv, layer.gate_up))
