"""PEFT's adapters of single parameters (`target_parameters`) on patched models: they work, or are refused at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.modules.replacement import Replacement
from tests.support.lora import RECIPES, adapted, config, logits, off, peft
from tests.support.steps import inner
from tests.support.tiny import CAUSAL
from tests.support.tiny import EXPERTS as EXPERTS_OF

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
#: family, PEFT's options: some of their targets are packed by int8
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("qwen2", {"target_modules": ["k_proj"], "target_parameters": ["down_proj.weight"]}),
    "linear-beside-embedding": (
        "mistral", {"target_modules": [], "target_parameters": ["embed_tokens.weight", "up_proj.weight"]},
    ),
}  # fmt: skip
#: all of their targets are
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "a-linear": ("llama", {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
}
#: of packed experts, which take adapters
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "beside-modules": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
    "beside-router": ("qwen3_moe", {"target_modules": [], "target_parameters": ["gate.weight", *EXPERTS]}),
    "alone": ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS}),
    "one-layer": ("mixtral", {"target_modules": [], "target_parameters": ["model.layers.1.mlp.experts.down_proj"]}),
    "interleaved-and-transposed": ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS}),
}
WAYS = ("get_peft_model", "inject_adapter_in_model")
WHY = r"the adapter \w+ is for .*_proj\.weight \(target_parameters: .*accelpatch.unpatch\(model\), add"


def patched(family: str, recipe: str = "int8") -> Any:
    return accelpatch.patch((CAUSAL | EXPERTS_OF)[family].make(), RECIPES[recipe], verify=False)


def rounded(family: str, recipe: str) -> Any:
    """The plain model with the weights that the patched one holds."""
    model, plain = patched(family, recipe), EXPERTS_OF[family].make()
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, one in module.float_parameters().items() if isinstance(module, Replacement) else ():
                plain.get_submodule(path).get_parameter(name).copy_(one)
    return plain


def names(model: Any) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules()]


def put(model: Any, way: str, name: str = "default", **options: Any) -> Any:
    """The model with an adapter, by one of PEFT's two ways."""
    torch.manual_seed(1)
    if way == "get_peft_model":
        return peft.get_peft_model(model, config(**options), name).eval()
    return peft.inject_adapter_in_model(config(**options), model, name).eval()


def add(model: Any, way: str, **options: Any) -> None:
    """A second adapter, beside one that `put` has put in."""
    torch.manual_seed(2)
    if way == "get_peft_model":
        model.add_adapter("other", config(**options))
    else:
        put(model, way, "other", **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", BESIDE)
def test_an_adapter_for_packed_weights_is_refused_at_once(case: str, way: str) -> None:
    family, options = BESIDE[case]
    model = patched(family)
    before, due = names(model), logits(model)
    with pytest.raises(PatchError, match=WHY):
        put(model, way, **options)
    assert names(model) == before
    assert torch.equal(logits(model), due)
    assert not hasattr(model, "peft_config")
    around = put(model, way, target_modules=["q_proj"])
    assert off(logits(around), due) > 0.05
    accelpatch.unpatch(around)
    assert "peft_config" in vars(inner(around))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ALONE)
def test_peft_itself_refuses_an_adapter_for_packed_weights_alone(case: str, way: str) -> None:
    family, options = ALONE[case]
    model = patched(family)
    before = names(model)
    with pytest.raises(ValueError, match="target_parameters"):
        put(model, way, **options)
    assert names(model) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [*BESIDE, *ALONE])
def test_a_second_adapter_for_packed_weights_is_refused_at_once(case: str, way: str) -> None:
    family, options = (BESIDE | ALONE)[case]
    model = patched(family)
    around = put(model, way, target_modules=["v_proj"])
    before, due = names(around), logits(around)
    with pytest.raises(PatchError, match=WHY):
        add(around, way, **options)
    assert list(model.peft_config) == ["default"]
    assert names(around) == before
    assert torch.equal(logits(around), due)
    accelpatch.unpatch(around)
    add(around, way, **options)
    assert list(model.peft_config) == ["default", "other"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ALONE)
def test_what_is_not_packed_takes_its_adapter_after_the_patch_too(case: str, way: str) -> None:
    """`exact` packs nothing."""
    family, options = ALONE[case]
    plain, model = put(CAUSAL[family].make(), way, **options), put(patched(family, "exact"), way, **options)
    assert off(logits(model), logits(patched(family, "exact"))) > 0.01
    assert off(logits(model), logits(plain)) < 1e-4
    due = logits(plain)
    accelpatch.unpatch(model)
    assert torch.equal(logits(model), due)


def test_parameters_beside_packed_ones_take_adapters() -> None:
    options: dict[str, Any] = {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}
    model, before = adapted(patched("qwen3_moe"), **options), logits(patched("qwen3_moe"))
    plain = adapted(CAUSAL["qwen3_moe"].make(), **options)
    assert off(logits(model), before) > 0.01
    assert off(logits(model), logits(plain)) < 0.1


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("case", OF_EXPERTS)
def test_packed_experts_take_adapters(case: str, recipe: str, way: str) -> None:
    family, options = OF_EXPERTS[case]
    model, plain = put(patched(family, recipe), way, **options), put(rounded(family, recipe), way, **options)
    assert off(logits(model), logits(patched(family, recipe))) > 0.05
    assert off(logits(model), logits(plain)) < 1e-3
    add(model, way, **options)
    add(plain, way, **options)
    for one in (model, plain):
        for module in one.modules():
            if isinstance(module, BaseTunerLayer):
                module.set_adapter("other")
    assert off(logits(model), logits(plain)) < 1e-3
    bare = put(EXPERTS_OF[family].make(), way, "other", **options)
    due = logits(accelpatch.unpatch(model))
    bare.load_state_dict({name: one for name, one in model.state_dict().items() if "default" not in name})
    assert off(due, logits(bare)) < 1e-5


def test_experts_that_take_adapters_later_disable_and_refuse_to_merge() -> None:
    family, options = OF_EXPERTS["mixtral"]
    model = patched(family)
    around = put(model, "get_peft_model", target_modules=["v_proj"])
    around.add_adapter("other", config(**options))
    before = logits(around)
    around.set_adapter("other")
    assert off(logits(around), before) > 0.05
    with around.disable_adapter():
        assert torch.equal(logits(around), logits(patched(family)))
    with pytest.raises(PatchError, match=r"experts: its weights are packed and cannot be written; call"):
        around.merge_adapter()


def test_a_model_that_is_unpatched_first_takes_them_and_is_patched_again() -> None:
    family, options = BESIDE["linear"]
    model = patched(family)
    with pytest.raises(PatchError, match=WHY):
        adapted(model, **options)
    around = adapted(accelpatch.unpatch(model), **options)
    accelpatch.patch(around, RECIPES["int8"], verify=False)
    assert off(logits(around), logits(adapted(CAUSAL[family].make(), **options))) < 0.1


def test_another_model_of_the_class_is_not_refused() -> None:
    model = patched("llama")
    other = type(model)(model.config).eval()
    assert adapted(other, target_modules=[], target_parameters=["q_proj.weight"]).peft_config
