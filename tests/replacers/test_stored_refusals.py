"""What of other libraries' layers is not taken over, and damaged tensors: before anything changes, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import PatchError, PlanError
from accelpatch.recipe.recipe import parse
from accelpatch.replacers.stored import stored_of
from tests.support.stored import K_PROJ, model_of, state

GPTQ, INT8, NF4 = "gptq-4bit-g32", "bnb-int8", "bnb-nf4"
LAYERS = 7  # linear layers of a fixture


def changed(**attributes: Any) -> Any:
    def change(module: Any) -> None:
        for name, value in attributes.items():
            setattr(module, name, value)

    return change


def renamed(name: str) -> Any:
    def change(module: Any) -> None:
        module.__class__ = type(name, (type(module),), {"__module__": type(module).__module__})

    return change


def as_float(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(module.out_features, module.in_features))


def with_forward(module: Any) -> None:
    module.forward = lambda x: x


KEPT: dict[str, tuple[str, Any, str]] = {
    "marlin": (GPTQ, renamed("MarlinLinear"), "in the packing of GPTQModel's MarlinLinear, which is not read"),
    "three-bits": (GPTQ, changed(bits=3), "3 bits are not read"),
    "rotated": (GPTQ, changed(online_full_had=True), "it rotates its input"),
    "own-adapter": (GPTQ, changed(adapter=SimpleNamespace(rank=4)), "an adapter of GPTQModel's own"),
    "other-format": (GPTQ, changed(format="marlin"), "its format marlin is not read"),
    "packed-anew": (GPTQ, changed(linear_mode="inference"), "packed anew at its first call"),
    "module-inside": (GPTQ, changed(inner=nn.Identity()), "it has modules inside (inner)"),
    "own-forward": (GPTQ, with_forward, "has a forward of its own on the instance"),
    "packed-for-a-cpu": (
        NF4,
        lambda module: setattr(module.weight.quant_state, "packing_format_for_cpu", True),
        "or load it again",
    ),
    "float-still": (NF4, as_float, "its weight is still float: move the model to its device first"),
    "not-quantised-yet": (INT8, as_float, "its weight is still torch.float32: move the model to its device first"),
}


def changed_and_kept(name: str, change: Any, reason: str) -> Any:
    """A model with one layer changed, which the plan keeps for this reason, and takes over all others."""
    model = model_of(name)
    change(model.get_submodule(K_PROJ))
    plan = accelpatch.plan(model, "int8")
    entry = next(entry for entry in plan.entries if entry.site.path == K_PROJ)
    assert entry.replacer is None
    assert reason in str(entry.reason)
    assert len([one for one in plan.replaced if one.as_stored]) == LAYERS - 1
    return model


@pytest.mark.parametrize("name, change, reason", KEPT.values(), ids=KEPT.keys())
def test_what_cannot_be_taken_over_stays_with_its_reason(name: str, change: Any, reason: str) -> None:
    model = changed_and_kept(name, change, reason)
    text = "extends: int8\nrules:\n  - name: linear\n    otherwise: error\n"
    with pytest.raises(PlanError, match="k_proj cannot become"):
        accelpatch.plan(model, parse(text))


def test_activations_that_nothing_runs_stay() -> None:
    plan = accelpatch.plan(model_of("ct-int-w8a8-static"), "int8")
    reasons = {str(entry.reason) for entry in plan.entries if entry.site.path.endswith("_proj")}
    assert len(reasons) == 1
    assert "its activations are asymmetric, which is not run" in reasons.pop()


def scheme(part: str, **attributes: Any) -> Any:
    """A change of what compressed-tensors says of a layer; of no attributes: the part is not there."""

    def change(module: Any) -> None:
        held = module.quantization_scheme
        setattr(held, part, SimpleNamespace(**vars(getattr(held, part, None) or SimpleNamespace()) | attributes))

    return change


def rotated(module: Any) -> None:
    module.R1_input = type("HadamardTransform", (nn.Identity,), {})()


def in_blocks(module: Any) -> None:
    module._parameters["weight_scale"] = nn.Parameter(torch.ones(2, 2), requires_grad=False)


PACKED, INT, FLOAT = "ct-pack-w4a16-g32", "ct-int-w8a8", "ct-float-fp8"
SCHEMES: dict[str, tuple[str, Any, str]] = {
    "rotated": (PACKED, rotated, "it is rotated while it runs (transform_config)"),
    "outputs": (INT, scheme("output_activations", num_bits=8), "its outputs are quantised (output_activations)"),
    "float-4": (PACKED, scheme("weights", type="float"), "4-bit floats (NVFP4, MXFP4) are not read"),
    "blocks": (FLOAT, in_blocks, "its scales are of blocks"),
    "blocks-of-4-bits": (PACKED, in_blocks, "its scales are of blocks"),
    "w4a8": (PACKED, scheme("input_activations", num_bits=8), "4-bit weights with quantised activations"),
    "w8a4": (INT, scheme("input_activations", num_bits=4), "activations of 4 bits as int are not run beside int"),
    "mixed": (INT, scheme("input_activations", type="float"), "activations of 8 bits as float are not run beside int"),
    "asymmetric": (INT, scheme("input_activations", symmetric=False), "its activations are asymmetric"),
}


@pytest.mark.parametrize("name, change, reason", SCHEMES.values(), ids=SCHEMES.keys())
def test_schemes_that_are_not_run_stay_with_their_reason(name: str, change: Any, reason: str) -> None:
    changed_and_kept(name, change, reason)


def test_8_bit_floats_of_another_form_stay() -> None:
    plan = accelpatch.plan(model_of("ct-float-fp8"), "int8", device=accelpatch.device.KNOWN["gfx942"])
    reasons = [str(entry.reason) for entry in plan.entries if entry.site.path == K_PROJ]
    assert reasons[0].endswith("gfx942 takes the other form of 8-bit floats")


def buffer(**given: Any) -> Any:
    def change(module: Any) -> None:
        for name, make in given.items():
            module._buffers[name] = make(module._buffers[name])

    return change


def largest(value: float) -> Any:
    def change(module: Any) -> None:
        module.weight.SCB = torch.full_like(module.weight.SCB, value)

    return change


def absmax(value: float, count: int | None = None) -> Any:
    def change(module: Any) -> None:
        held = module.weight.quant_state
        held.absmax = torch.full_like(held.absmax, value)[:count]

    return change


BAD: dict[str, tuple[str, Any, str]] = {
    "no-codes": (GPTQ, buffer(qweight=lambda one: None), "qweight is missing"),
    "narrow-codes": (GPTQ, buffer(qweight=lambda one: one[:, :8]), r"qweight is \[8, 8\]"),
    "float-codes": (GPTQ, buffer(qweight=Tensor.float), "qweight is torch.float32"),
    "zero-scales": (GPTQ, buffer(scales=torch.zeros_like), "scales has zero, NaN or infinity"),
    "nan-scales": (GPTQ, buffer(scales=lambda one: one * float("nan")), "scales has zero, NaN or infinity"),
    "groups-beyond": (GPTQ, buffer(g_idx=lambda one: one + 9), "g_idx names groups from 9 to 10, of 2"),
    "groups-below": (GPTQ, buffer(g_idx=lambda one: one - 1), "g_idx names groups from -1"),
    "nan-rows": (INT8, largest(float("nan")), "SCB has NaN, infinity or a negative number"),
    "zero-rows": (INT8, largest(0.0), "scale has a zero where the codes in q are not zero"),
    "negative-rows": (INT8, largest(-1.0), "SCB has NaN, infinity or a negative number"),
    "no-rows": (INT8, lambda module: setattr(module.weight, "SCB", None), "SCB is missing"),
    "nan-blocks": (NF4, absmax(float("nan")), "weight.absmax has NaN or infinity"),
    "few-blocks": (NF4, absmax(1.0, 3), r"weight.absmax is torch.float32 \[3\]"),
}


@pytest.mark.parametrize("name, change, message", BAD.values(), ids=BAD.keys())
def test_bad_tensors_are_named_before_anything_changes(name: str, change: Any, message: str) -> None:
    model = model_of(name)
    change(model.get_submodule(K_PROJ))
    before = state(model)
    with pytest.raises(PatchError, match=rf"k_proj: {message}.*nothing was changed"):
        accelpatch.patch(model, "int8", verify=False)
    assert repr(state(model)) == repr(before)


def test_offloaded_weights_are_refused_and_planned() -> None:
    model = model_of(GPTQ)
    for module in model.modules():
        for name, one in module._buffers.items():
            module._buffers[name] = None if one is None or name == "inv_freq" else one.to("meta")
    assert len([one for one in accelpatch.plan(model, "int8").replaced if one.as_stored]) == LAYERS
    with pytest.raises(PatchError, match="is on the meta device"):
        accelpatch.patch(model, "int8")


def test_plain_modules_are_not_known() -> None:
    assert stored_of(nn.Linear(4, 4)) is None
    assert stored_of(nn.Embedding(4, 4)) is None
    wrapper: Any = type("Linear4bit", (nn.Module,), {"adapter_layer_names": ("lora_A",)})()
    wrapper.base_layer = nn.Linear(4, 4)
    plan = accelpatch.plan(nn.Sequential(wrapper), parse("extends: int8\nrules: [{name: head, match: {role: head}}]"))
    assert {entry.site.path: entry.site.stored for entry in plan.entries} == {"0.base_layer": None}
