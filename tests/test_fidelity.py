"""The measuring of fidelity itself, on hand-made distributions a tiny model; then the bounds on the embedded one."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch
from accelpatch.quant import int4, int8
from accelpatch.quant.formats import dequantize
from accelpatch.recipe import recipe
from scripts.benchmarks.cpu import resident_bytes
from tests.support.fidelity import (
    BLOCK,
    FORMATS,
    RECIPES,
    Divergence,
    Format,
    english_tokens,
    grid_step,
    logits_of,
    mean_kl_top1,
    noised,
    perplexity,
    simulate,
)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_divergence_of_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    found = mean_kl_top1(torch.stack((p, p)).log(), torch.stack((p, q)).log() + 3)
    assert found.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, rel=1e-6)
    assert found.top1 == 0.5


def test_divergence_resolves_small_differences() -> None:
    """KL of a logit moved by d is p(1 - p) d^2 / 2 to second order: here 4e-10, far below float32's noise."""
    logits = torch.zeros(1, 1000)
    moved = logits.clone()
    moved[0, 0] = 1e-3
    assert mean_kl_top1(logits, moved).kl == pytest.approx(0.001 * 0.999 * 1e-6 / 2, rel=1e-3)


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    assert perplexity(torch.zeros(2, 5, 37), torch.zeros(2, 5, dtype=torch.int64)) == pytest.approx(37, rel=1e-5)


def test_english_is_prose_without_layout() -> None:
    seen = {}

    def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
        seen["text"] = text
        return SimpleNamespace(input_ids=torch.arange(len(text.split()))[None])

    assert english_tokens(tokenizer, 1280).shape == (5, 256)
    paragraphs = seen["text"].split("\n\n")[:-1]
    assert len(paragraphs) > 10
    assert all("\n" not in paragraph and len(paragraph) > 190 for paragraph in paragraphs)
    assert not any(mark in seen["text"] for mark in ("***", ">>>", "::="))


def test_noise_is_seeded_bounded_and_keeps_the_tie() -> None:
    model = simulate(tiny(), Format("grid", 4, (BLOCK,), symmetric=False))
    before = weights(model)
    moved = noised(model, seed=0)
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, value in moved.state_dict().items():
        if "norm" in name:
            assert torch.equal(value, before[name])
            continue
        blocks = before[name].unflatten(1, (-1, BLOCK))
        levels = 127 if "embed" in name or "head" in name else 15
        share = (value - before[name]).unflatten(1, (-1, BLOCK)) / grid_step(blocks, levels)
        assert 0.45 < float(share.abs().max()) <= 0.5001
        assert float(share.square().mean()) == pytest.approx(1 / 12, rel=0.05)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(noised(model, 0)).values(), weights(moved).values(), strict=True)
    )
    assert not torch.equal(noised(model, 1).lm_head.weight, moved.lm_head.weight)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_simulation_rounds_a_copy(format: Format) -> None:
    model = tiny()
    before = weights(model)
    copied = simulate(model, format)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    weight, found = before["model.layers.1.mlp.down_proj.weight"], copied.model.layers[1].mlp.down_proj.weight
    size = next(size for size in format.group_size if size is None or weight.shape[1] % size == 0)
    if format.bits == 8:
        due = dequantize(int8.quantize(weight, group_size=size))
    else:
        due = dequantize(int4.quantize(weight, group_size=size, symmetric=format.symmetric))
    assert torch.equal(found, due)
    assert not torch.equal(found, weight)


@pytest.mark.parametrize("name", RECIPES)
def test_measured_formats_are_those_of_the_recipes(name: str) -> None:
    rules = {rule.name: rule for rule in recipe.load(name).rules}
    format = RECIPES[name]
    bits, options = f"int{format.bits}_weight_only", rules["linear"].options
    assert (rules["linear"].replace, rules["head"].replace) == (bits, "int8_weight_only")
    assert tuple(options["group_size"]) == format.group_size
    assert tuple(rules["head"].options["group_size"]) == format.head
    assert options.get("symmetric", True) == format.symmetric


@pytest.fixture(scope="module")
def embedded() -> SimpleNamespace:
    """The embedded model off its grid, 1,280 tokens of English, and its logits."""
    from accelpatch.models import load

    loaded = load.load("smollm2-135m", dtype=torch.float32)
    ids, model = english_tokens(loaded.tokenizer, 1280), noised(loaded.model, seed=0)
    found = {"raw": loaded.model, "model": model, "ids": ids, "logits": logits_of(model, ids), "measured": {}}
    return SimpleNamespace(**found, tokenizer=loaded.tokenizer)


def divergence(place: SimpleNamespace, format: Format) -> Divergence:
    if format not in place.measured:
        logits = logits_of(simulate(place.model, format), place.ids)
        place.measured[format] = mean_kl_top1(place.logits, logits)
    return place.measured[format]


@pytest.mark.slow
def test_int8_keeps_the_distribution(embedded: SimpleNamespace) -> None:
    found = divergence(embedded, RECIPES["int8"])
    assert found.kl <= 0.005
    assert found.top1 >= 0.95
    assert found.kl > 1e-4  # a format that rounds shows: else nothing was simulated


@pytest.mark.slow
def test_noise_hides_the_grid(embedded: SimpleNamespace) -> None:
    """Q4_1's own blocks of 32 find the raw weights exactly; off the grid they must round."""
    weight = embedded.raw.model.layers[3].mlp.down_proj.weight.data
    moved = embedded.model.model.layers[3].mlp.down_proj.weight.data
    found, lost = (
        float((dequantize(int4.quantize(value, group_size=BLOCK)) - value).norm() / value.norm())
        for value in (weight, moved)
    )
    assert found < 1e-3 < 0.05 < lost


@pytest.mark.nightly
def test_smoothing_takes_most_of_what_int8_activations_lose(embedded: SimpleNamespace) -> None:
    """Calibrated on other English than it is measured on; plain: the same without smoothing."""
    words = embedded.tokenizer.decode(english_tokens(embedded.tokenizer, 3328)[5:].flatten())
    statistics = accelpatch.calibrate(embedded.model, [words], tokenizer=embedded.tokenizer, samples=8)
    smoothed = recipe.load("smoothquant")
    found = {}
    for name, one in {"plain": replace(smoothed, calibrate=None), "smoothquant": smoothed}.items():
        with accelpatch.patched(embedded.model, one, verify=False, statistics=statistics) as model:
            found[name] = mean_kl_top1(embedded.logits, logits_of(model, embedded.ids))
    assert found["smoothquant"].kl <= 0.40 * found["plain"].kl
    assert found["smoothquant"].top1 >= 0.92
    assert found["plain"].kl > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=pytest.mark.nightly)])
def test_kernels_add_nothing_to_what_the_format_loses(embedded: SimpleNamespace, name: str) -> None:
    """The patched model's KL is within 1% of the same format simulated in float, on two of the windows, or on all."""
    windows = slice(2) if name == "int4" else slice(None)
    ids, logits = embedded.ids[windows], embedded.logits[windows]
    due = mean_kl_top1(logits, logits_of(simulate(embedded.model, RECIPES[name]), ids))
    with accelpatch.patched(embedded.model, name) as model:
        assert model.accelpatch.report().verification.failures == []
        found = mean_kl_top1(logits, logits_of(model, ids))
    assert found.kl == pytest.approx(due.kl, rel=0.01)
    assert name != "int8" or (found.kl <= 0.005 and found.top1 >= 0.95)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("int8", 0.30), ("int4", 0.20)])
def test_a_patched_model_holds_its_packs_and_no_float_copy(embedded: SimpleNamespace, name: str, share: float) -> None:
    model = copy.deepcopy(embedded.raw)
    before = resident_bytes(model)
    accelpatch.patch(model, name, verify=False, keep_original="none")
    assert 0.1 < resident_bytes(model) / before <= share
