"""The public calls: names, plans from configurations, evaluation, patching at first use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationMixin

import accelpatch
from accelpatch import device as devices
from accelpatch.errors import AccelpatchError, PatchError, PlanError
from accelpatch.kernels.compiling import libraries
from tests.support.simulated import greedy, logits, simulated
from tests.support.tiny import CAUSAL, VOCABULARY, full_batch, padded_batch, snapshot


@pytest.mark.parametrize("name", accelpatch.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(accelpatch, name)
    assert found.__doc__
    assert name in dir(accelpatch)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        accelpatch.pach  # noqa: B018


def test_unpatch_of_an_unpatched_model() -> None:
    with pytest.raises(PatchError, match=r"not patched; call accelpatch\.patch\(model, recipe\) first"):
        accelpatch.unpatch(CAUSAL["llama"].make())


def test_progress_counts_every_stage_to_its_end() -> None:
    model = CAUSAL["llama"].make()
    seen: dict[str, list[tuple[int, int]]] = {}
    accelpatch.patch(
        model, "int8", progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total))
    )
    assert set(seen) == {"capture", "build and verify", "verify fused", "check"}
    for steps in seen.values():
        total = steps[0][1]
        assert steps == [(done, total) for done in range(1, total + 1)]
    assert seen["build and verify"][-1][0] == len(model.accelpatch.plan.replaced)
    assert set(model.accelpatch.report().seconds) == set(seen)


def test_a_device_may_be_given() -> None:
    gfx942 = devices.KNOWN["gfx942"]
    plan = accelpatch.plan(CAUSAL["llama"].make().to("meta"), "int8", device=gfx942)
    assert plan.device is gfx942
    assert plan.to_dict()["arch"] == "gfx942"
    assert plan.fits
    tight = replace(gfx942, memory=plan.resident_bytes + plan.cache_bytes - 1)
    assert not accelpatch.plan(CAUSAL["llama"].make().to("meta"), "int8", device=tight).fits


def test_the_cache_that_a_plan_counts() -> None:
    model = CAUSAL["llama"].make(torch.bfloat16)
    plan = accelpatch.plan(model, "int8")
    assert plan.max_length == 128  # the model's own limit
    assert plan.cache_bytes == 2 * 2 * 2 * 16 * 128 * 2  # keys and values, layers, heads, head size, tokens, bytes


def test_a_plan_from_a_folder(tmp_path: Path) -> None:
    model = CAUSAL["mixtral"].make()
    model.config.save_pretrained(tmp_path)
    here, there = accelpatch.plan(model, "int8"), accelpatch.plan_from_config(str(tmp_path), "int8")
    assert [s.__dict__ for s in here.report().sites] == [s.__dict__ for s in there.report().sites]
    long = accelpatch.plan_from_config(str(tmp_path), "int8", arch="gfx942", max_length=1000)
    assert (long.max_length, long.device.arch) == (1000, "gfx942")
    with pytest.raises(PlanError, match=r"no facts are known of the arch gfx000; known are: .*gfx942"):
        accelpatch.plan_from_config(str(tmp_path), arch="gfx000")


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx90a", "sm_90"])
def test_llama2_7b_from_its_configuration_alone(arch: str, recipe: str) -> None:
    plan = accelpatch.plan_from_config("llama2-7b", recipe, arch=arch)
    report = plan.report()
    assert report.resident_bytes[0] == 6738415616 * 2
    head = 32000 * 4096
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    products = [e for e in plan.replaced if e.site.role not in ("layer", "mlp", "norm", "rotary")]
    assert {(len(products), e.choice.kernel) for e in products} == {(7 * 32 + 1, "hip")}
    sizes = [(e.site, e.choice.detail["group_size"]) for e in products if "group_size" in e.choice.detail]
    assert all(site.k % size == 0 for site, size in sizes)
    scales = 4 * sum(site.n * (site.k // size) for site, size in sizes)  # float32, or float16 with a minimum
    assert (recipe == "exact") == (scales == 0)
    expected = linear * {"exact": 2, "int8": 1, "int4": 0.5}[recipe] + head * (2 if recipe == "exact" else 1) + scales
    rest = 65 * 4096 * 2 + 4096 * 2  # norms, and a row of the embedding
    assert report.token_bytes[1] == pytest.approx(expected + rest, rel=1e-9)
    assert plan.fits
    assert "layers.{0..31}.mlp.down_proj" in str(plan)


def test_evaluate_agrees_with_the_formulas_and_undoes() -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    ids = torch.randint(2, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(3))
    steps: list[tuple[str, int, int]] = []
    found = accelpatch.evaluate(model, "int4", ids, progress=lambda *step: steps.append(step))
    assert snapshot(model) == before
    plain = simulated(model, accelpatch.plan(model, "int4"), torch.float32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    p, q = (logits(one, batch)[:-1].double().log_softmax(-1) for one in (model, plain))
    targets = ids[0, 1:, None]
    assert found.tokens == 39
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert found.perplexity_before == pytest.approx(math.exp(-p.gather(1, targets).mean()), rel=1e-5)
    assert found.perplexity_after == pytest.approx(math.exp(-q.gather(1, targets).mean()), rel=1e-4)
    assert found.perplexity_after != found.perplexity_before
    assert {stage for stage, _, _ in steps} >= {"original", "patched"}


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (8,), (1, 0)], ids=str)
def test_evaluate_refuses_what_is_no_text(shape: tuple[int, ...]) -> None:
    model = CAUSAL["llama"].make()
    with pytest.raises(PatchError, match=r"token ids of shape \[1, L\], L at least 2"):
        accelpatch.evaluate(model, "int8", torch.ones(shape, dtype=torch.int64))
    assert not hasattr(model, "accelpatch")


class Watch:
    def __init__(self) -> None:
        self.models: list[nn.Module] = []

    def __call__(self, model: nn.Module) -> None:
        self.models.append(model)


@pytest.mark.smoke
@pytest.mark.parametrize("use", [logits, greedy], ids=["forward", "generate"])
def test_models_are_patched_at_their_first_use(use: Callable[[nn.Module, Any], torch.Tensor]) -> None:
    model, other = CAUSAL["llama"].make(), CAUSAL["gpt2"].make()
    expected = use(simulated(model, accelpatch.plan(model, "int8"), torch.float32), padded_batch())
    watch, generate = Watch(), GenerationMixin.generate
    with accelpatch.patch_on_first_use("int8", on_patched=watch):
        assert not hasattr(model, "accelpatch")
        for _ in range(2):
            torch.testing.assert_close(use(model, padded_batch()), expected, rtol=1e-4, atol=1e-5)
        assert watch.models == [model]
        use(other, full_batch())
        assert watch.models == [model, other]
    assert GenerationMixin.generate is generate
    assert model.accelpatch.report().verification.failures == []
    assert not hasattr(model.model, "accelpatch")
    late = CAUSAL["llama"].make()
    use(late, full_batch())
    assert not hasattr(late, "accelpatch")
    accelpatch.unpatch(model)
    assert logits(model, full_batch()).equal(logits(late, full_batch()))


@pytest.mark.skipif(
    libraries.why_not("cpu", devices.probe("cpu")) is not None, reason="no native library can be built here"
)
def test_models_met_at_their_first_use_have_their_fast_steps() -> None:
    model = CAUSAL["llama"].make()
    with accelpatch.patch_on_first_use("int8"):
        greedy(model, padded_batch(), 8)
    assert model.accelpatch.report().paths["native step"] == 7


def test_first_use_leaves_trained_and_patched_models_alone() -> None:
    training, patched = CAUSAL["llama"].make().train(), accelpatch.patch(CAUSAL["llama"].make(), "exact")
    with accelpatch.patch_on_first_use("int8"):
        logits(training, full_batch())
        logits(patched, full_batch())
    assert not hasattr(training, "accelpatch")
    assert patched.accelpatch.plan.recipe.name == "exact"


def test_a_failure_at_first_use_is_not_hidden() -> None:
    broken, generate = CAUSAL["llama"].make(), GenerationMixin.generate
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(AccelpatchError, match="lm_head"), accelpatch.patch_on_first_use("int8"):
        logits(broken, full_batch())
    assert GenerationMixin.generate is generate
    assert Counter(type(module).__name__ for module in broken.modules())["LlamaRMSNorm"] == 5


def test_to_dict_is_plain_data() -> None:
    model = accelpatch.patch(CAUSAL["gemma2"].make(), "int4")

    def check(value: Any) -> None:
        assert isinstance(value, str | int | float | bool | type(None) | list | tuple | dict), type(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            check(item)

    check(model.accelpatch.report().to_dict())
    check(model.accelpatch.plan.to_dict())


GOOD = {"rules": [{"match": {"role": "linear"}, "replace": "int8_weight_only"}], "verify": {"bound": 0.05}}


@pytest.mark.parametrize(
    "recipe, said",
    [
        (None, r"the recipe is None: give the name of a bundled one"),
        (7, r"the recipe is 7: give the name"),
        ({"rules": 1}, r"rules.*list"),
        ({"rules": [object()]}, r"YAML has no form for"),
        ({"nonsense": 1}, r"nonsense"),
    ],
)
def test_a_recipe_that_is_none(recipe: Any, said: str) -> None:
    model = CAUSAL["llama"].make()
    before = snapshot(model)
    with pytest.raises(AccelpatchError, match=said) as raised:
        accelpatch.patch(model, recipe)
    assert isinstance(raised.value, TypeError) == (not isinstance(recipe, dict))
    assert snapshot(model) == before


def test_a_recipe_as_a_mapping() -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, GOOD)
    assert {site.replacer for site in model.accelpatch.report().sites if site.replacer} == {"int8_weight_only"}


@pytest.mark.parametrize("act", [accelpatch.patch, accelpatch.plan, accelpatch.unpatch, accelpatch.calibrate])
def test_a_model_that_is_none(act: Callable[..., Any]) -> None:
    with pytest.raises(AccelpatchError, match=r"'gpt2', and no torch.nn.Module: load it first") as raised:
        act("gpt2")
    assert isinstance(raised.value, TypeError)
