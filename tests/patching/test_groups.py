"""What is smoothed together is patched together or not at all, and the plan says which groups and why not others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import PlanError, VerifyError
from accelpatch.modules.quantized_linear import W8A8Linear
from accelpatch.patching import stages
from accelpatch.patching.groups import chosen, lines, with_groups
from accelpatch.recipe.recipe import parse
from tests.support.packed import replacements
from tests.support.resized import OTHERS
from tests.support.simulated import logits
from tests.support.smoothing import calibrated, made_up
from tests.support.tiny import CAUSAL, full_batch, snapshot

LAYER = "model.layers.0"
ATTENTION = [f"{LAYER}.input_layernorm", *(f"{LAYER}.self_attn.{name}_proj" for name in "qkvo")]
MLP = [f"{LAYER}.post_attention_layernorm", *(f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down"))]


@dataclass(frozen=True)
class Group:
    source: str
    consumers: tuple[str, ...]
    kind: str = "norm -> linear"


GROUPS = [Group("n", ("q", "k", "v")), Group("v", ("o",)), Group("m", ("g", "u")), Group("u", ("d",))]


def test_failures_reach_all_that_are_smoothed_together() -> None:
    assert with_groups({}, GROUPS) == {}
    found = with_groups({"o": "too far"}, GROUPS)
    assert found.keys() == {"n", "q", "k", "v", "o"}
    assert found["o"] == "too far"
    assert {found[path] for path in "nqkv"} == {"it is smoothed together with o, which stays"}


def test_each_names_the_failure_that_it_stays_for() -> None:
    found = with_groups({"g": "too far", "o": "farther", "x": "not in a group"}, GROUPS)
    assert found["d"] == found["u"] == found["m"] == "it is smoothed together with g, which stays"
    assert found["n"] == found["q"] == "it is smoothed together with o, which stays"
    assert found["x"] == "not in a group"
    assert found["o"] == "farther"


def test_which_groups_are_chosen() -> None:
    every = dict.fromkeys("nqkvomgud", True)
    assert chosen(GROUPS, every) == (tuple(GROUPS), [])
    assert chosen(GROUPS, {}) == ((), [])
    found, notes = chosen(GROUPS, every | {"n": False})
    assert found == tuple(GROUPS[1:])
    assert notes == ["not smoothed: norm -> linear, whose source stays (1 times)"]
    with pytest.raises(PlanError, match=r"^k cannot be smoothed, and q reads the same input of n"):
        chosen(GROUPS, every | {"k": False})
    assert lines(GROUPS[:1]) == ["smoothed together: norm -> linear"]
    assert lines(GROUPS) == ["smoothed together: norm -> linear (4 times)"]


def test_the_plan_has_a_line_for_each_kind() -> None:
    text = str(accelpatch.plan(CAUSAL["llama"].make(), "smoothquant"))
    assert [line for line in text.splitlines() if line.startswith("smoothed together")] == [
        "smoothed together: input_layernorm -> q_proj, k_proj, v_proj (2 times)",
        "smoothed together: v_proj -> o_proj (2 times)",
        "smoothed together: post_attention_layernorm -> gate_proj, up_proj (2 times)",
        "smoothed together: up_proj -> down_proj (2 times)",
    ]


def _fail(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Make verification find these sites over their bound."""
    real = stages.over_bound

    def over(errors: Any, recipe: Any, entry: Any) -> str | None:
        return "over its bound by decree" if entry.site.path in paths else real(errors, recipe, entry)

    monkeypatch.setattr(stages, "over_bound", over)


@pytest.mark.parametrize("failed, stays", [
    pytest.param(ATTENTION[1], ATTENTION, id="q_proj"), pytest.param(ATTENTION[4], ATTENTION, id="o_proj"),
    pytest.param(ATTENTION[0], ATTENTION, id="a-norm"), pytest.param(MLP[3], MLP, id="down_proj"),
])  # fmt: skip
def test_one_over_its_bound_keeps_its_group(failed: str, stays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, failed)
    model = CAUSAL["llama"].make()
    statistics, before, due = calibrated(model), snapshot(model), logits(model, full_batch())
    originals = {path: model.get_submodule(path) for path in stays}
    accelpatch.patch(model, "smoothquant", statistics=statistics)
    for path, module in originals.items():
        assert model.get_submodule(path) is module
        assert not isinstance(module, W8A8Linear)
    report = model.accelpatch.report()
    reasons = {site.path: site.reason for site in report.sites if site.failed}
    assert reasons.pop(failed) == "over its bound by decree"
    assert reasons == dict.fromkeys(set(stays) - {failed}, f"it is smoothed together with {failed}, which stays")
    assert {line.split(": ")[0] for line in report.verification.failures} == set(stays)
    assert not {path for group in model.accelpatch.plan.groups for path in (group.source, *group.consumers)} & set(
        stays
    )
    others = [path for path in replacements(model) if path.endswith("_proj")]
    assert len(others) == 14 - sum(path.endswith("_proj") for path in stays)
    error = (logits(model, full_batch()) - due).norm() / due.norm()
    assert 0 < error < 0.3
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def test_the_rest_computes_as_if_the_group_had_never_been_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer alone, whose attention stays: the outputs are those of a model with only its MLP replaced."""
    model, twin = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    statistics = made_up(model, 0.5, 2)
    recipe = parse("name: r\nextends: smoothquant\nverify: {bound: 9}\n")
    attention = [path.replace("layers.0", f"layers.{at}") for at in (0, 1) for path in ATTENTION]
    _fail(monkeypatch, *(path for path in attention if path.endswith("o_proj")))
    accelpatch.patch(model, recipe, statistics=statistics)
    accelpatch.patch(twin, recipe, statistics=statistics, verify=False)
    for path in attention:
        parent, _, name = path.rpartition(".")
        setattr(twin.get_submodule(parent), name, CAUSAL["llama"].make().get_submodule(path))
    assert logits(model, full_batch()).equal(logits(twin, full_batch()))


def test_on_failure_error_leaves_the_model_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, MLP[3])
    model = CAUSAL["llama"].make()
    statistics, before = calibrated(model), snapshot(model)
    strict = parse("name: strict\nextends: smoothquant\nverify: {on_failure: error}\n")
    with pytest.raises(VerifyError, match="down_proj: over its bound by decree; nothing was changed"):
        accelpatch.patch(model, strict, statistics=statistics)
    assert snapshot(model) == before


KEEP = "name: mine\nextends: smoothquant\nrules:\n  - match: {{{}}}\n    replace: keep\n"


def test_a_kept_consumer_is_an_error_of_the_plan() -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    with pytest.raises(PlanError, match=r"model\.layers\.0\.self_attn\.k_proj cannot be smoothed, and .*q_proj reads"):
        accelpatch.patch(model, parse(KEEP.format("role: k_proj")))
    assert snapshot(model) == before
    off = parse(KEEP.format("role: k_proj") + "calibrate: {alpha: null}\n")
    accelpatch.patch(model, off)
    assert not isinstance(model.get_submodule(f"{LAYER}.self_attn.k_proj"), W8A8Linear)
    assert model.accelpatch.plan.groups == ()
    assert model.get_submodule(f"{LAYER}.self_attn.q_proj").factors is None


def test_a_kept_source_leaves_its_group_alone() -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, parse(KEEP.format("role: norm")), statistics=calibrated(model))
    notes = model.accelpatch.report().notes
    assert "not smoothed: input_layernorm -> q_proj, k_proj, v_proj, whose source stays (2 times)" in notes
    assert "not smoothed: post_attention_layernorm -> gate_proj, up_proj, whose source stays (2 times)" in notes
    assert "smoothed together: v_proj -> o_proj (2 times)" in notes
    layer = model.get_submodule(LAYER)
    assert layer.self_attn.q_proj.factors is None
    assert layer.self_attn.o_proj.factors is not None
    assert model.accelpatch.report().verification.failures == []


@pytest.mark.parametrize("target", ["k_proj", "up_proj", "o_proj"])
def test_an_adapter_around_a_consumer(target: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install 'accelpatch[peft]'")
    config = peft.LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(CAUSAL["llama"].make(), config).eval()
    before = snapshot(model)
    with pytest.raises(PlanError, match=rf"{target} cannot be smoothed, for an adapter around it"):
        accelpatch.patch(model, "smoothquant")
    assert snapshot(model) == before
    accelpatch.patch(model, parse("name: plain\nextends: smoothquant\ncalibrate: {alpha: null}\n"))
    merged = peft.get_peft_model(CAUSAL["llama"].make(), config).merge_and_unload().eval()
    accelpatch.patch(merged, "smoothquant", statistics=calibrated(merged))
    assert merged.accelpatch.report().verification.failures == []


def test_no_alpha_is_no_smoothing() -> None:
    model: Any = CAUSAL["llama"].make()
    recipe = parse("name: plain\nextends: smoothquant\ncalibrate: {alpha: null}\n")
    plan = accelpatch.plan(model, recipe)
    assert plan.groups == ()
    assert not plan.calibrates
    accelpatch.patch(model, recipe, statistics="no/such/file")  # none are needed
    assert torch.equal(model.model.norm.weight, CAUSAL["llama"].make().model.norm.weight)


@pytest.mark.parametrize("first", [True, False], ids=["before-the-patch", "after-it"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_feeds_a_module_that_is_no_linear_layer_is_not_smoothed(name: str, first: bool) -> None:
    change, model, plain = OTHERS[name][1], CAUSAL["llama"].make(), CAUSAL["llama"].make()
    change(plain)
    if first:
        change(model)
    accelpatch.patch(model, "smoothquant", statistics=calibrated(model))
    left = [one for one in model.accelpatch.report().notes if "a weight is no linear layer's" in one]
    assert bool(left) == first
    if first:
        due = logits(plain, full_batch())
        assert (logits(model, full_batch()) - due).norm() < 0.05 * due.norm()
    else:
        change(model)
    accelpatch.unpatch(model)
    assert torch.equal(logits(model, full_batch()), logits(plain, full_batch()))
