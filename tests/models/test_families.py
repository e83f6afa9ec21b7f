"""Every family of causal language models: the plan, the numbers, generation, and the way back."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import accelpatch
from tests.support.simulated import assert_as_exact_as_torch, assert_float_rule, greedy, logits, simulated
from tests.support.tiny import CAUSAL, LAYERS, VOCABULARY, Tiny, full_batch, padded_batch, snapshot, unique_bytes

RECIPES = ("exact", "int8", "int4")
SMOKE = ("llama", "gemma3", "gpt2", "mixtral")  # gated, sandwich norms, Conv1D, experts
WEIGHTS = {"exact": None, "int8": "int8_weight_only", "int4": "int4_weight_only"}


def families(*, smoke: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """One case for each family, by its name."""
    marks = {name: [pytest.mark.smoke] if name in smoke else [] for name in CAUSAL}
    return pytest.mark.parametrize("tiny", [pytest.param(CAUSAL[name], id=name, marks=marks[name]) for name in CAUSAL])


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@families()
def test_the_plan_counts_every_byte_and_takes_what_is_expected(tiny: Tiny, recipe: str) -> None:
    model = tiny.make()
    before = snapshot(model)
    plan = accelpatch.plan(model, recipe)
    report = plan.report()
    assert sum(site.resident_bytes[0] for site in report.sites) == unique_bytes(model)
    taken = Counter((site.role, site.replacer) for site in report.sites if site.replacer is not None)
    linear = {(role, WEIGHTS[recipe]): count for role, count in tiny.linears.items()} if recipe != "exact" else {}
    head = {("head", "int8_weight_only"): 1} if recipe != "exact" else {}
    assert {key: count for key, count in taken.items() if "weight_only" in key[1]} == linear | head
    fused = Counter(site.replacer for site in report.sites if site.replacer and "weight_only" not in site.replacer)
    assert fused == tiny.fused | ({f"{recipe}_experts": tiny.experts} if recipe != "exact" and tiny.experts else {})
    assert all(site.reason for site in report.sites if site.replacer is None)
    assert snapshot(model) == before
    assert str(plan)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@families(smoke=SMOKE)
def test_logits_tokens_and_the_way_back(tiny: Tiny, recipe: str) -> None:
    model, batch, padded = tiny.make(), full_batch(), padded_batch()
    before, expected = snapshot(model), logits(model, padded)
    plan = accelpatch.plan(model, recipe)
    plain, exact = simulated(model, plan, torch.float32), simulated(model, plan, torch.float64)

    accelpatch.patch(model, recipe)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert report.replaced == len(plan.replaced)
    assert [site.path for site in report.sites if site.unverified] == []
    assert isinstance(model, type(plain))
    allowed = assert_float_rule(logits(model, batch), logits(exact, batch), logits(plain, batch))
    # float64 attention has NaN behind padding, so there plain torch stands in: each may err by as much as allowed
    assert (logits(model, padded) - logits(plain, padded)).abs().max() <= 2 * allowed
    assert recipe == "exact" or (logits(model, padded) - expected).abs().max() > 100 * allowed
    assert greedy(model, padded).equal(greedy(plain, padded))

    assert accelpatch.unpatch(model) is model
    assert snapshot(model) == before
    assert logits(model, padded).equal(expected)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@families()
def test_bfloat16(tiny: Tiny, recipe: str) -> None:
    model, batch = tiny.make(torch.bfloat16), full_batch()
    before = snapshot(model)
    plan = accelpatch.plan(model, recipe)
    plain, exact = simulated(model, plan, torch.bfloat16), simulated(model, plan, torch.float64)
    with accelpatch.patched(model, recipe):
        report = model.accelpatch.report()
        assert report.verification.failures == []
        assert report.replaced == len(plan.replaced)
        output = logits(model, batch)
        assert output.dtype == torch.bfloat16
        assert_as_exact_as_torch(output, logits(exact, batch), logits(plain, batch))
    assert snapshot(model) == before


@pytest.mark.parametrize("tiny", [pytest.param(CAUSAL[name], id=name) for name in ("mixtral", "qwen3_moe")])
def test_no_expert_bytes_are_left_behind(tiny: Tiny) -> None:
    model = tiny.make()
    sites = accelpatch.plan(model, "int8").report().sites
    experts = [site for site in sites if site.role == "experts"]
    assert len(experts) == tiny.experts
    for site in experts:
        owned = unique_bytes(model.get_submodule(site.path))
        assert owned > 0
        assert site.replacer == "int8_experts"
        assert site.resident_bytes[0] == owned
        assert owned / 4 < site.resident_bytes[1] < owned / 3  # float32 scales beside the int8 codes
        assert site.token_bytes == tuple(size // 2 for size in site.resident_bytes)  # two experts of four
    routers = [site for site in sites if site.role == "router"]
    assert len(routers) == tiny.experts
    assert {(site.replacer, site.reason) for site in routers} == {(None, "kept by the recipe")}
    assert {site.token_bytes[0] for site in routers} == {64 * 4 * 4}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_token_bytes_are_what_a_token_reads(name: str) -> None:
    """Tied (llama): the whole table for the head and a row of it for the embedding. Apart: the row is float."""
    tiny = CAUSAL[name]
    model = tiny.make()
    report = accelpatch.plan(model, "int8").report()
    weights = [p for p in model.model.layers.parameters() if p.dim() == 2] + [model.lm_head.weight]
    norms = 4 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    row = model.config.hidden_size * 4
    assert report.token_bytes[0] == 4 * sum(p.numel() for p in weights) + norms + row
    groups = {64: 1, 96: 3}  # of 64 and of 32: the first of the recipe's group sizes that divides K
    table = sum(p.numel() + 4 * p.shape[0] * groups[p.shape[1]] for p in weights)  # int8, and float32 scales
    assert report.token_bytes[1] == table + norms + (row // 4 + 4 if tiny.tied else row)
    assert report.resident_bytes[1] == table + norms + (0 if tiny.tied else VOCABULARY * row)


def test_identical_layers_are_one_line_of_the_printed_plan() -> None:
    text = str(accelpatch.plan(CAUSAL["llama"].make(), "int8"))
    lines = [line for line in text.splitlines() if "self_attn.q_proj" in line]
    assert len(lines) == 1
    assert f"layers.{{0..{LAYERS - 1}}}.self_attn.q_proj" in lines[0]
    assert "int8_weight_only" in lines[0]
