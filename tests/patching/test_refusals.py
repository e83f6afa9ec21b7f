"""Models and recipes that cannot be: a clear error, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.utils import prune

import accelpatch
from accelpatch.errors import PatchError, PlanError
from accelpatch.recipe import recipe as recipes
from tests.support.simulated import assert_float_rule, logits, simulated
from tests.support.tiny import CAUSAL, full_batch, make, snapshot, unique_bytes


def llama(**changes: Any) -> nn.Module:
    return CAUSAL["llama"].make(**changes)


def rule(text: str, verify: str = "{bound: 1.0}") -> recipes.Recipe:
    """A recipe of the given rules, one a line, in YAML's flow style."""
    lines = "\n".join(f"  - {line.strip()}" for line in text.strip().splitlines())
    return recipes.parse(f"name: test\ndescription: for a test\nrules:\n{lines}\nverify: {verify}\n")


def in_fsdp(model: nn.Module) -> nn.Module:
    """A stand-in with the class name that torch gives: a real one needs a process group and a GPU."""
    block = model.model.layers[0]
    block.__class__ = type("FSDPLlamaDecoderLayer", (type(block),), {})  # as fully_shard does
    return model


def wrapped_in_fsdp(model: nn.Module) -> nn.Module:
    class FullyShardedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    return FullyShardedDataParallel().eval()


def patched_already(model: nn.Module) -> nn.Module:
    return accelpatch.patch(model, "exact")


STATES: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "twice": (patched_already, r"already patched; call accelpatch\.unpatch"),
    "training": (lambda model: model.train(), r"training mode .* call model\.eval\(\)"),
    "meta": (lambda model: model.to("meta"), "on the meta device"),
    "fsdp2": (in_fsdp, "sharded by FSDP"),
    "fsdp1": (wrapped_in_fsdp, "sharded by FSDP"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_model_in_the_wrong_state(state: str) -> None:
    change, message = STATES[state]
    model = change(llama())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(PatchError, match=message):
        accelpatch.patch(model, "int8")
    assert [type(module) for module in model.modules()] == classes


def test_dtensor_weights(tmp_path: Any) -> None:
    model = llama()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        up = model.model.layers[1].mlp.up_proj
        up.weight = nn.Parameter(distribute_tensor(up.weight.data, mesh, [Replicate()]))
        with pytest.raises(PatchError, match=r"layers\.1\.mlp\.up_proj\.weight is a DTensor"):
            accelpatch.patch(model, "int8")
    finally:
        dist.destroy_process_group()


def test_keep_original_is_checked() -> None:
    with pytest.raises(PatchError, match="keep_original is 'disk'; it is one of cpu, none"):
        accelpatch.patch(llama(), "int8", keep_original="disk")


RECIPES: dict[str, tuple[str, str]] = {
    "matches-nothing": ("{match: {name: model.layer.*}, replace: int8_weight_only}", "matches no module of this model"),
    "unknown-replacer": ("{match: {role: linear}, replace: int8_weightonly}", "no replacer is called int8_weightonly"),
    "unknown-option": (
        "{match: {role: linear}, replace: int8_weight_only, options: {group_sise: 32}}",
        r"no option group_sise; did you mean group_size\?",
    ),
    "option-type": (
        "{match: {role: linear}, replace: int4_weight_only, options: {symmetric: 3}}",
        "option symmetric is 3, expected bool",
    ),
    "option-bool-as-int": (
        "{match: {role: linear}, replace: int4_weight_only, options: {group_size: true}}",
        "option group_size is True, expected int or list",
    ),
    "tie-split": (
        "{match: {role: head}, replace: int4_weight_only}",
        r"would split the weight that lm_head shares with model\.embed_tokens",
    ),
    "must-be": (
        "{match: {role: norm}, replace: int8_weight_only, otherwise: error}",
        r"model\.layers\.0\.input_layernorm cannot become int8_weight_only",
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_that_does_not_fit(case: str) -> None:
    text, message = RECIPES[case]
    model = llama()
    before = snapshot(model)
    for act in (accelpatch.plan, accelpatch.patch):
        with pytest.raises(PlanError, match=message) as caught:
            act(model, rule(text))
        assert str(caught.value).startswith("recipe:4:")  # line 4 of the recipe
    assert snapshot(model) == before


class Greedy(accelpatch.Replacer):
    """Takes a whole MLP with all that is in it, and says of no child that its own rule decides."""

    name = "greedy_mlp"

    def propose(self, site: Any, options: Any, device: Any) -> accelpatch.Choice:
        return accelpatch.Choice("torch", site.token_bytes, site.token_bytes, site.bytes)

    def build(self, site: Any, choice: Any, stats: Any = None) -> nn.Module:
        return site.original


def test_two_owners_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accelpatch.replacers._registry, "greedy_mlp", Greedy())
    both = rule("{match: {role: mlp}, replace: greedy_mlp}\n{match: {role: linear}, replace: int8_weight_only}")
    with pytest.raises(PlanError, match=r"two owners of one parameter: greedy_mlp takes .*mlp with all") as caught:
        accelpatch.plan(llama(), both)
    assert "int8_weight_only takes model.layers.0.mlp." in str(caught.value)
    attention = "{match: {name: '*self_attn*', role: linear}, replace: int8_weight_only}"
    accelpatch.plan(llama(), rule(f"{{match: {{role: mlp}}, replace: greedy_mlp}}\n{attention}"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("path", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_weights_that_are_not_finite(path: str, recipe: str, value: float) -> None:
    model = llama()
    with torch.no_grad():
        model.get_submodule(path).weight[3, 5] = value
    before = snapshot(model)
    with pytest.raises(PatchError, match=rf"{path}: .*\[3, 5\] is {value}.*nothing was changed"):
        accelpatch.patch(model, recipe)
    assert snapshot(model) == before
    accelpatch.patch(model, "exact")  # rounds nothing, so it has nothing against them


def test_mixed_dtypes() -> None:
    """bfloat16 with the norms in float32, as some checkpoints are loaded."""
    model = CAUSAL["mistral"].make(torch.bfloat16)
    for path, module in model.named_modules():
        if path.endswith("down_proj"):
            module.to(torch.float32).register_forward_pre_hook(lambda m, args: (args[0].float(),))
            module.register_forward_hook(lambda m, args, output: output.bfloat16())
    before = snapshot(model)
    plan = accelpatch.plan(model, "int8")
    assert sum(site.resident_bytes[0] for site in plan.report().sites) == unique_bytes(model)
    accelpatch.patch(model, "int8")
    assert model.accelpatch.report().verification.failures == []
    down = model.model.layers[0].mlp.down_proj
    assert down.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert logits(model, full_batch()).dtype == torch.bfloat16
    accelpatch.unpatch(model)
    assert snapshot(model) == before


ODD = {
    "hidden_size": 65,
    "head_dim": 16,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "vocab_size": 1001,
    "intermediate_size": 97,
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
def test_odd_sizes(recipe: str, tied: bool) -> None:
    model = llama(**ODD, tie_word_embeddings=tied)
    plan = accelpatch.plan(model, recipe)
    plain, exact = simulated(model, plan, torch.float32), simulated(model, plan, torch.float64)
    accelpatch.patch(model, recipe)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    batch = full_batch()
    assert_float_rule(logits(model, batch), logits(exact, batch), logits(plain, batch))
    q_proj = next(site for site in report.sites if site.path.endswith("q_proj"))
    head = next(site for site in report.sites if site.role == "head")
    if recipe == "int4":
        assert q_proj.replacer is None
        assert q_proj.reason == "K = 65 is a multiple of none of the group sizes [128, 64, 32]"
    elif recipe == "int8":
        assert q_proj.replacer == "int8_weight_only"
    assert head.replacer == (None if recipe == "exact" else "int8_weight_only")


class Shared(nn.Module):
    """Two names for one module, and one parameter in three modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.third = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.again = self.first
        self.other.weight = self.third.weight = self.first.weight
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(self.other(self.again(self.first(x)))))


def test_one_module_under_two_names_and_one_parameter_in_three_modules() -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    before, x = snapshot(model), torch.randn(2, 64)
    expected = model(x)
    plan = accelpatch.plan(model, "int8")
    assert sum(site.resident_bytes[0] for site in plan.report().sites) == unique_bytes(model)
    sites = {site.path: site.tied for site in plan.report().sites}
    assert {"first", *sites["first"]} == {"first", "again", "other", "third"}
    accelpatch.patch(model, "int8", inputs=[{"x": x}])
    assert model.first is model.again
    assert model.first.layout is model.other.layout is model.third.layout
    assert model.first is not model.other
    assert (model(x) - expected).norm() / expected.norm() < 0.05
    assert not model(x).equal(expected)
    accelpatch.unpatch(model)
    assert snapshot(model) == before
    with pytest.raises(PlanError, match="would split the weight that first shares with"):
        accelpatch.plan(model, "int4")


def test_a_model_without_anything_to_replace() -> None:
    model = make(
        "Llama", num_hidden_layers=0, **{k: v for k, v in CAUSAL["llama"].config.items() if k != "num_hidden_layers"}
    )
    with pytest.raises(PlanError, match="matches no module"):
        accelpatch.patch(model, "int8")


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_packed_experts_are_not_pruned(recipe: str, name: str) -> None:
    model = accelpatch.patch(CAUSAL["qwen3_moe"].make(), recipe)
    experts, due = model.model.layers[0].mlp.experts, logits(model, full_batch())
    with pytest.raises(PatchError, match="packed and cannot be replaced"):
        prune.l1_unstructured(experts, name, amount=0.5)
    for hook in list(experts._forward_pre_hooks):  # which torch leaves behind
        del experts._forward_pre_hooks[hook]
    assert torch.equal(logits(model, full_batch()), due)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_that_are_not_packed_are_pruned_after_the_patch(name: str) -> None:
    model, plain = accelpatch.patch(CAUSAL["qwen3_moe"].make(), "exact"), CAUSAL["qwen3_moe"].make()
    before = logits(model, full_batch())
    for one in (model, plain):
        prune.l1_unstructured(one.model.layers[0].mlp.experts, name, amount=0.5)
    due = logits(plain, full_batch())
    assert (due - before).norm() > 0.01 * due.norm()
    assert (logits(model, full_batch()) - due).norm() < 1e-4 * due.norm()
    accelpatch.unpatch(model)
    assert torch.equal(logits(model, full_batch()), due)
