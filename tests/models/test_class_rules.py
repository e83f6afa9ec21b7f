"""Models that are no causal language models, by class rules alone: BERT, T5 and ViT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from tests.support.simulated import assert_as_exact_as_torch, assert_float_rule, simulated
from tests.support.tiny import full_batch, make, padded_batch, snapshot, unique_bytes

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForMaskedLM", _SIZES | {"vocab_size": 161, "max_position_embeddings": 32}),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "t5-gated": (
        "T5",
        "ForConditionalGeneration",
        {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "vit": ("ViT", "ForImageClassification", _SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 5}),
}  # fmt: skip
models = pytest.mark.parametrize(
    "name", [pytest.param(name, id=name, marks=[] if name == "t5-gated" else [pytest.mark.smoke]) for name in MODELS]
)


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    prefix, suffix, config = MODELS[name]
    return make(prefix, dtype, suffix=suffix, **config)


def inputs(name: str, *, padded: bool = False) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))}
    batch = padded_batch() if padded else full_batch()
    decoder = {"decoder_input_ids": batch["input_ids"][:, :5].flip(1)} if name.startswith("t5") else {}
    return batch | decoder


@torch.no_grad()
def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    dtype = next(p.dtype for p in model.parameters())
    result: Tensor = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}).logits
    return result


def linear_bytes(model: nn.Module) -> int:
    """Bytes of every weight that an nn.Linear of the original multiplies by."""
    weights = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(w.numel() * w.element_size() for w in weights.values())


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@models
def test_linear_weights_are_replaced_and_every_byte_is_counted(name: str, recipe: str) -> None:
    model = build(name)
    report = accelpatch.plan(model, recipe).report()
    assert sum(site.resident_bytes[0] for site in report.sites) == unique_bytes(model)
    taken = [site for site in report.sites if site.replacer is not None and "weight_only" in site.replacer]
    weights = {id(m.weight): m.weight for m in (model.get_submodule(site.path) for site in taken)}
    assert sum(w.numel() * w.element_size() for w in weights.values()) >= 0.95 * linear_bytes(model)


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@models
def test_outputs_are_those_of_the_simulated_model(name: str, recipe: str) -> None:
    model = build(name)
    concatenates = recipe == "exact"  # q, k and v of fused layers
    before = snapshot(model, places=not concatenates)
    padded = inputs(name, padded=True)
    first, kept = outputs(model, padded), padded.get("attention_mask", torch.ones(1)).bool()
    if name != "bert":
        kept = torch.ones(first.shape[:-1], dtype=torch.bool)
    plan = accelpatch.plan(model, recipe)
    plain, exact = simulated(model, plan, torch.float32), simulated(model, plan, torch.float64)
    with accelpatch.patched(model, recipe):
        report = model.accelpatch.report()
        assert report.verification.failures == []
        assert [site.path for site in report.sites if site.unverified] == []
        batch = inputs(name)
        allowed = assert_float_rule(outputs(model, batch), outputs(exact, batch), outputs(plain, batch))
        changed = outputs(model, padded)
        assert recipe == "exact" or (changed - first)[kept].abs().max() > 100 * allowed
        assert (changed - outputs(plain, padded))[kept].abs().max() <= 2 * allowed
    assert snapshot(model, places=not concatenates) == before
    assert outputs(model, padded).equal(first)


@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
def test_bfloat16_of_other_models(name: str) -> None:
    model = build(name, torch.bfloat16)
    before = snapshot(model)
    plan = accelpatch.plan(model, "int8")
    plain, exact = simulated(model, plan, torch.bfloat16), simulated(model, plan, torch.float64)
    batch = inputs(name)
    with accelpatch.patched(model, "int8"):
        assert model.accelpatch.report().verification.failures == []
        assert_as_exact_as_torch(outputs(model, batch), outputs(exact, batch), outputs(plain, batch))
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["t5", "t5-gated"])
def test_encoder_decoder_generation(name: str) -> None:
    model, batch = build(name), padded_batch()
    plain = simulated(model, accelpatch.plan(model, "int8"), torch.float32)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with accelpatch.patched(model, "int8"):
        assert model.generate(**batch, **options).equal(plain.generate(**batch, **options))


def test_the_tied_table_of_t5_is_one_pack_in_every_place() -> None:
    model = build("t5")
    places = ("lm_head", "shared", "encoder.embed_tokens", "decoder.embed_tokens")
    before = {place: model.get_submodule(place) for place in places}
    assert len({id(module.weight) for module in before.values()}) == 1
    site = next(site for site in accelpatch.plan(model, "int8").report().sites if site.role == "head")
    assert site.replacer == "int8_weight_only"
    assert {site.path, *site.tied} == set(places)
    with accelpatch.patched(model, "int8"):
        after = {place: model.get_submodule(place) for place in places}
        assert not {id(module) for module in after.values()} & {id(module) for module in before.values()}
        assert len({id(module.weight_owner) for module in after.values()}) == 1
        assert len({module.weight[7, 3].item() for module in after.values()}) == 1
        for one in places:  # one module under two names stays one module
            assert [after[one] is after[two] for two in places] == [before[one] is before[two] for two in places]
        assert model.get_input_embeddings() is after["shared"]
    assert {place: model.get_submodule(place) for place in places} == before


def test_the_tied_decoder_of_bert_keeps_its_bias() -> None:
    model = build("bert")
    bias = model.cls.predictions.decoder.bias
    with accelpatch.patched(model, "int8"):
        assert type(model.cls.predictions.decoder).__name__ != "Linear"
        assert model.cls.predictions.decoder.bias is bias
        assert model.cls.predictions.bias is bias
