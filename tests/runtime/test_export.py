"""torch.export of patched models: every recipe's operations stand in the program, for other lengths too."""

from __future__ import annotations

import io

import pytest
import torch

import accelpatch
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, full_batch


@pytest.mark.each_value
@spread("recipe, name", ["exact", "flash", "int8", "int4", "smoothquant", "compact"], ["llama", "gemma2", "gpt2"])
def test_exported_programs_compute_what_the_model_does(recipe: str, name: str) -> None:
    model = CAUSAL[name].make()
    accelpatch.patch(model, recipe, verify=False)
    batch = {**full_batch(), "use_cache": False}
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    with torch.no_grad():
        due = model(**batch).logits
        program = torch.export.export(model, (), batch, dynamic_shapes=shapes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        torch.testing.assert_close(loaded(**batch).logits, due)
        longer = {name: one if name == "use_cache" else one.repeat(1, 2) for name, one in batch.items()}
        torch.testing.assert_close(loaded(**longer).logits, model(**longer).logits, rtol=1e-4, atol=1e-4)
        if name == "llama":
            assert any("accelpatch" in str(node.target) for node in program.graph.nodes)
