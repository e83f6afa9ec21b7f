"""Experts of every family: numbers against the same weights in plain torch, plans, moves, files, refusals, unpatch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.errors import KernelError, PatchError
from accelpatch.kernels import dispatch
from accelpatch.kernels.triton import launch
from accelpatch.modules.quantized_experts import QuantizedExperts
from accelpatch.recipe.recipe import parse
from tests.support.simulated import assert_float_rule, logits, simulated
from tests.support.tiny import EXPERTS, Tiny, full_batch, padded_batch, snapshot

LENGTH = 64
FORMATS = ("int8", "int4", "mxfp4")
#: experts alone, so that what is compared is theirs
ALONE = "rules:\n  - match: {{role: experts}}\n    replace: {}_experts\nverify: {{bound: 0.3}}\n"


#: linear layers too, whose floats are most of some of these models
WITH_LAYERS = """extends: int4
rules:
  - match: {role: linear}
    replace: mxfp4_weight_only
  - match: {role: experts}
    replace: mxfp4_experts
"""


def families() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tiny", [pytest.param(EXPERTS[name], id=name) for name in EXPERTS])


def alone(form: str) -> Any:
    return parse(ALONE.format(form))


def whole(form: str) -> Any:
    """A recipe for all of a model."""
    return parse(WITH_LAYERS) if form == "mxfp4" else form


def experts_of(model: Any) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@pytest.mark.parametrize("form", FORMATS)
@families()
def test_logits_of_the_rounded_weights_and_the_way_back(tiny: Tiny, form: str) -> None:
    model, batch = tiny.make(), padded_batch()
    before, expected = snapshot(model), logits(model, batch)
    plan = accelpatch.plan(model, alone(form))
    plain, exact = simulated(model, plan, torch.float32), simulated(model, plan, torch.float64)
    accelpatch.patch(model, alone(form))
    assert model.accelpatch.report().verification.failures == []
    assert len(experts_of(model)) == tiny.experts
    ran = dispatch.calls["packed_experts", "cpu"]
    assert_float_rule(logits(model, batch), logits(exact, batch), logits(plain, batch))
    assert dispatch.calls["packed_experts", "cpu"] == ran + tiny.experts
    accelpatch.unpatch(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model, batch), expected)


@families()
def test_64_steps_beside_the_rounded_weights(tiny: Tiny) -> None:
    model, batch = tiny.make(), full_batch()
    plain = simulated(model, accelpatch.plan(model, alone("int4")), torch.float32)
    accelpatch.patch(model, alone("int4"), verify=False)
    options = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False}
    made = model.generate(**batch, **options, output_logits=True, return_dict_in_generate=True)
    due = plain.generate(**batch, **options)
    apart = (made.sequences != due).any(0).nonzero()
    first = int(apart[0]) if len(apart) else made.sequences.shape[1]
    if first < made.sequences.shape[1]:  # only where two tokens are as good as equal
        scores = made.logits[first - batch["input_ids"].shape[1]].topk(2).values
        assert float((scores[:, 0] - scores[:, 1]).min()) < 1e-3


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_files_hold_the_codes_and_load_again(name: str, form: str, tmp_path: Path) -> None:
    model, batch = EXPERTS[name].make(), full_batch()
    model.save_pretrained(tmp_path / "float")
    accelpatch.patch(model, whole(form))
    expected = logits(model, batch)
    model.save_pretrained(tmp_path / "codes")
    loaded = accelpatch.load(str(tmp_path / "codes")).model
    assert torch.equal(logits(loaded, batch), expected)
    assert len(experts_of(loaded)) == EXPERTS[name].experts
    assert torch.equal(logits(accelpatch.load(str(tmp_path / "float"), whole(form)).model, batch), expected)
    files = sum(file.stat().st_size for file in (tmp_path / "codes").glob("*.safetensors"))
    assert files < sum(file.stat().st_size for file in (tmp_path / "float").glob("*.safetensors")) / 2


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = accelpatch.patch(EXPERTS["mixtral"].make(), "int8", verify=False)
    model.save_pretrained(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    held = load_file(file)
    name = next(name for name in held if name.endswith("experts.gate_up_proj_q"))
    held[name] = held[name][:, :-1].contiguous()
    save_file(held, file)
    with pytest.raises(accelpatch.AccelpatchError):
        accelpatch.load(str(tmp_path))


@pytest.mark.parametrize("form", FORMATS)
def test_casts_state_dicts_and_copies(form: str) -> None:
    model, batch = EXPERTS["mixtral"].make(), full_batch()
    accelpatch.patch(model, whole(form), verify=False)
    expected, state = logits(model, batch), {key: value.clone() for key, value in model.state_dict().items()}
    assert torch.equal(logits(copy.deepcopy(model), batch), expected)
    codes = [key for key in state if key.endswith("experts.gate_up_proj_q")]
    assert codes
    assert all(state[key].dtype == torch.int8 for key in codes)
    other = accelpatch.patch(EXPERTS["mixtral"].make(), whole(form), verify=False)
    for module in experts_of(other):
        module.load_state_dict({key: torch.zeros_like(value) for key, value in module.state_dict().items()})
    assert not torch.equal(logits(other, batch), expected)
    other.load_state_dict(state)
    assert torch.equal(logits(other, batch), expected)
    model.to(torch.bfloat16)
    assert all(value.dtype == state[key].dtype for key, value in model.state_dict().items() if "proj_scale" in key)
    accelpatch.unpatch(model)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_a_float_state_dict_and_writes_are_refused() -> None:
    model = EXPERTS["mixtral"].make()
    floats = model.state_dict()
    accelpatch.patch(model, "int8", verify=False)
    with pytest.raises(RuntimeError, match="is a float weight, and the experts are quantised"):
        model.load_state_dict(floats, strict=False)
    module = experts_of(model)[0]
    assert module.gate_up_proj.shape == floats["model.layers.0.mlp.experts.gate_up_proj"].shape
    error = (module.gate_up_proj - floats["model.layers.0.mlp.experts.gate_up_proj"]).abs().max()
    assert 0 < error < 0.05
    with pytest.raises(PatchError, match="its weights are packed and cannot be replaced"):
        module.gate_up_proj = nn.Parameter(torch.zeros(1))
    for write in (lambda: module.down_proj.add_(1), lambda: setattr(module.down_proj, "data", torch.zeros(1))):
        with pytest.raises(PatchError, match="unpatch"):
            write()


def test_float_weights_have_the_shape_of_the_original() -> None:
    """GPT-OSS's are transposed, and its rows of gate and up alternate."""
    model = EXPERTS["gpt_oss"].make()
    original = {key: value.clone() for key, value in model.model.layers[0].mlp.experts.named_parameters()}
    accelpatch.patch(model, "int8", verify=False)
    for name, due in original.items():
        held = getattr(model.model.layers[0].mlp.experts, name).detach()
        assert held.shape == due.shape
        assert float((held - due.detach()).norm() / due.detach().norm()) < 0.02


def _odd(ids: Tensor, kind: str) -> Tensor:
    ids = ids.clone()
    if kind == "named twice":
        ids[:, 1] = ids[:, 0]
    elif kind == "out of range":
        ids[0, 0], ids[1, 1] = 4, -1
    else:
        ids[:] = 2
    return ids


@pytest.mark.parametrize("kind", ["named twice", "out of range", "one expert alone"])
def test_odd_choices_of_a_router(kind: str) -> None:
    model = EXPERTS["mixtral"].make()
    original = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(5, 64, generator=generator), torch.rand(5, 2, generator=generator)
    ids = _odd(torch.randint(0, 4, (5, 2), generator=generator), kind)
    accelpatch.patch(model, "int8", verify=False)
    made = model.model.layers[0].mlp.experts(x, ids, weights)
    due = torch.zeros_like(x)
    for token in range(5):
        for place in range(2):
            if 0 <= (expert := int(ids[token, place])) < 4:
                one = torch.full((1, 1), expert), weights[token, place].view(1, 1)
                with torch.no_grad():
                    due[token] += original(x[token : token + 1], *one)[0]
    assert float((made - due).norm() / due.norm()) < 0.02


def test_ids_of_another_shape_are_an_error() -> None:
    model = accelpatch.patch(EXPERTS["mixtral"].make(), "int8", verify=False)
    with pytest.raises(KernelError, match="ids are int64"):
        model.model.layers[0].mlp.experts(torch.randn(3, 64), torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 2))


class Plain(nn.Module):
    """Experts of no interface."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 64))
        self.down_proj = nn.Parameter(torch.randn(4, 64, 32))


def _of_another_gate(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.__class__ = type("OtherExperts", (type(experts),), {"_apply_gate": lambda self, both: both})


def _of_another_activation(model: Any) -> None:
    model.model.layers[0].mlp.experts.act_fn = nn.Tanh()


def _of_no_interface(model: Any) -> None:
    model.model.layers[0].mlp.experts = Plain()


def _with_an_adapter(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.experts, "gate_up_proj", nn.Identity())


REASONS = {
    "gate": (_of_another_gate, "OtherExperts._apply_gate is"),
    "activation": (_of_another_activation, "the activation of MixtralExperts is not known"),
    "interface": (_of_no_interface, "no gated experts by transformers' experts interface"),
    "adapter": (_with_an_adapter, "down_proj, and gate_up_proj and down_proj are known"),
}


@pytest.mark.parametrize("change", [*REASONS])
def test_reasons_in_the_plan(change: str) -> None:
    act, reason = REASONS[change]
    model = EXPERTS["mixtral"].make()
    act(model)
    sites = [
        site for site in accelpatch.plan(model, "int4").report().sites if site.path.startswith("model.layers.0.mlp.e")
    ]
    assert any(reason in (site.reason or "") for site in sites), [site.reason for site in sites]
    accelpatch.patch(model, "int4", verify=False)
    assert len(experts_of(model)) == 1


def test_a_width_that_no_group_divides() -> None:
    model = EXPERTS["mixtral"].make(intermediate_size=40)
    reasons = [site.reason for site in accelpatch.plan(model, "int4").report().sites if site.role == "experts"]
    assert reasons == ["K = 40 is odd, or a multiple of none of the group sizes [128, 64, 32]"] * 2
    replaced = [site.replacer for site in accelpatch.plan(model, "int8").report().sites if site.role == "experts"]
    assert replaced == ["int8_experts"] * 2


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_on_a_gpu_triton_takes_all(recipe: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    with torch.device("meta"):
        model = EXPERTS["mixtral"].make(torch.bfloat16)
    plan = accelpatch.plan(model, recipe, device=KNOWN[arch])
    experts = [site for site in plan.report().sites if site.role == "experts"]
    assert {(site.replacer, site.kernel) for site in experts} == {
        ("experts" if recipe == "exact" else f"{recipe}_experts", "triton")
    }
    assert all(entry.choice.detail["groups"] == (64, 96) for entry in plan.replaced if recipe == "int8"
               and entry.site.role == "experts" and entry.choice)  # fmt: skip
    layers = [site for site in plan.report().sites if site.role == "layer"]
    assert all(site.fused and "8 launches" in str(site.kernel) for site in layers)


def test_experts_with_transposed_weights_stay_in_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    with torch.device("meta"):
        model = EXPERTS["gpt_oss"].make(torch.bfloat16)
    sites = accelpatch.plan(model, "exact", device=KNOWN["sm_90"]).report().sites
    assert all("transposed" in (site.reason or "") for site in sites if site.role == "experts")
