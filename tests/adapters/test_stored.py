"""LoRA adapters on layers that another library quantised: the same numbers before and after, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import PatchError
from tests.support.lora import adapted
from tests.support.steps import inner
from tests.support.stored import K_PROJ, expected, floats_of, model_of

NAMES = ("bnb-int8", "gptq-4bit-g32")
ids = pytest.mark.parametrize("name", NAMES)


@torch.no_grad()
def logits(model: Any, name: str) -> Tensor:
    found: Tensor = model(input_ids=expected(name)["input_ids"]).logits[0]
    return found


def as_float(name: str) -> Any:
    """The same model with float weights."""
    return model_of(name, plain=("_proj",))


@ids
def test_adapters_on_a_patched_model_are_plain_lora(name: str) -> None:
    due = logits(adapted(as_float(name)), name)
    model = adapted(accelpatch.patch(model_of(name), "exact"))
    kinds = {type(module).__module__ for module in model.modules() if hasattr(type(module), "adapter_layer_names")}
    assert kinds == {"peft.tuners.lora.layer"}
    torch.testing.assert_close(logits(model, name), due, rtol=0, atol=1e-4)
    accelpatch.unpatch(model)
    assert type(model.get_submodule(f"base_model.model.{K_PROJ}").base_layer) is type(
        model_of(name).get_submodule(K_PROJ)
    )
    torch.testing.assert_close(logits(model, name), due, rtol=0, atol=1e-4)


def test_an_adapted_model_is_patched_inside_and_comes_back() -> None:
    name = "bnb-int8"  # PEFT takes its layers without the library: they are linear layers
    model = adapted(model_of(name))
    due, original = logits(model, name), inner(model).get_submodule(f"{K_PROJ}.base_layer")
    accelpatch.patch(model, "exact")
    site = next(one for one in inner(model).accelpatch.report().sites if one.path == f"{K_PROJ}.base_layer")
    assert (site.replacer, site.stored, site.role) == ("int8_weight_only", "LLM.int8()", "k_proj")
    assert inner(model).accelpatch.report().verification.failures == []
    torch.testing.assert_close(logits(model, name), due, rtol=0, atol=1e-4)
    accelpatch.unpatch(model)
    assert inner(model).get_submodule(f"{K_PROJ}.base_layer") is original
    assert torch.equal(logits(model, name), due)


@ids
def test_merging_into_a_stored_weight_is_refused(name: str) -> None:
    model = adapted(accelpatch.patch(model_of(name), "exact", verify=False))
    before = logits(model, name)
    with pytest.raises(Exception, match="as stored, and its original could not take another"):
        model.merge_adapter()
    assert torch.equal(logits(model, name), before)


def test_a_wrapper_of_the_same_name_is_no_stored_layer() -> None:
    model = model_of("bnb-int8")

    class Linear8bitLt(nn.Module):  # PEFT's own has its library's name
        adapter_layer_names = ("lora_A",)

        def __init__(self, base_layer: Any):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x: Tensor) -> Any:
            return self.base_layer(x)

    wrapped = Linear8bitLt(model.get_submodule(K_PROJ))
    model.set_submodule(K_PROJ, wrapped.eval())
    accelpatch.patch(model, "exact")
    assert model.get_submodule(K_PROJ) is wrapped
    due = floats_of(model_of("bnb-int8").get_submodule(K_PROJ))
    torch.testing.assert_close(torch.as_tensor(wrapped.base_layer.weight), due, rtol=2e-7, atol=0)
    with pytest.raises(PatchError, match="already patched"):
        accelpatch.patch(model, "exact")
