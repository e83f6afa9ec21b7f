"""Adapters in real graphs on a GPU: the modules' logits, swaps at run time, rows that do not know of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.fusion.read_layers import fused_model
from tests.support.lora import adapted, config
from tests.support.steps import assert_float_rule, inner, logits
from tests.support.tiny import CAUSAL, full_batch, padded_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NAMES = ("llama", "phi3", "gemma2", "gemma3")


def patched(name: str, recipe: str, **changes: Any) -> Any:
    model = accelpatch.patch(CAUSAL[name].make(torch.bfloat16).cuda(), recipe, verify=False)
    return adapted(model, **changes)


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, recipe: str) -> None:
    assert_float_rule(patched(name, recipe), padded_batch())


def test_swaps_between_graphs() -> None:
    model = patched("llama", "int8")
    model.add_adapter("second", config(rank=16))
    found: dict[str, Any] = {}
    for name in ("default", "second") * 3:
        model.set_adapter(name)
        made = logits(model, full_batch(), 12)
        assert torch.equal(made, found.setdefault(name, made))
        with model.disable_adapter():
            alone = logits(model, full_batch(), 12)
        assert torch.equal(alone, found.setdefault("none", alone))
    assert not torch.allclose(found["default"], found["second"])
    assert not torch.allclose(found["default"], found["none"])
    assert not any("modules" in path or "stock" in path for path in inner(model).accelpatch.report().paths)


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_a_row_is_what_it_is_alone(recipe: str) -> None:
    """Bit for bit, of the products of a layer in batches of up to 8."""
    model = inner(patched("llama", recipe))
    with torch.no_grad():
        layer = fused_model(model).layers[0]
        for trial in range(50):
            rows = torch.randn(1 + trial % 8, 64, generator=torch.Generator().manual_seed(trial)).to(
                "cuda", torch.bfloat16
            )
            for product in (layer.qkv, layer.o, lambda x: layer.gate_up(x, layer.mlp_norm, gate=layer.activation)):
                together = product(rows)  # type: ignore[operator]
                alone = torch.cat([product(row[None]) for row in rows])  # type: ignore[operator]
                assert torch.equal(together, alone)
