"""Packed weights that a module reads, within a captured program."""

from __future__ import annotations

import pytest

import accelpatch
from accelpatch.kernels.cpu import native_library
from accelpatch.modules.packed_weight import unpacked_once
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.encoder_decoders import StrictGraph, encoder_decoder, texts


def test_a_weight_that_is_read_for_its_dtype_is_not_unpacked_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's MLP reads it. The last run of a program is what a graph would record."""
    unpacked: list[int] = []
    before = QuantizedModule.dequantized
    monkeypatch.setattr(QuantizedModule, "dequantized", lambda self: unpacked.append(1) or before(self))
    recorded: list[int] = []

    class Recording(StrictGraph):
        def _run(self) -> None:
            unpacked.clear()
            super()._run()
            recorded.append(len(unpacked))

        def replay(self) -> None:
            recorded.append(0)  # a graph runs no Python

    monkeypatch.setitem(capture.GRAPHS, "cpu", Recording)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")  # it asks for addresses
    model = accelpatch.patch(encoder_decoder("flan-t5"), "int8", verify=False)
    for _ in range(2):
        model.generate(**texts(), max_new_tokens=4, do_sample=False)
    assert model.accelpatch.report().paths[CAPTURED] == 6
    assert len(recorded) > 6
    assert not any(recorded)


def test_a_weight_that_is_computed_with_is_unpacked_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its floats are gone once the capture has ended, unless the graph makes them itself."""
    unpacked: list[int] = []
    before = QuantizedModule.dequantized
    monkeypatch.setattr(QuantizedModule, "dequantized", lambda self: unpacked.append(1) or before(self))
    model = accelpatch.patch(encoder_decoder("flan-t5"), "int8", verify=False)
    layer = model.decoder.block[0].layer[-1].DenseReluDense.wo
    with unpacked_once():
        assert layer.weight.dtype == layer.weight.dtype
        assert layer.weight.shape == (layer.out_features, layer.in_features)
        assert not unpacked
        sums = [layer.weight.sum() for _ in range(3)]  # the first ones are of the runs before the capture
    assert len(unpacked) == 3
    assert sums[0] == sums[1] == sums[2]
