"""Recipe flash: attention of many families through one place, beside stock, and the way back."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig

import accelpatch
from accelpatch import device as devices
from accelpatch.errors import PlanError
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Spec
from accelpatch.modules.attention import FlashAttention
from accelpatch.modules.attention_settings import NAME
from accelpatch.recipe.recipe import parse
from accelpatch.replacers.attention import spec_of
from tests.support.tiny import CAUSAL, make, padded_batch

FORCED = (
    "extends: flash\nrules:\n  - name: attention\n    replace: flash_attention\n    options: {{implementation: {}}}\n"
)
FORCED += "    otherwise: error\n"
SINKS = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
         "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1,
         "sliding_window": 4, "pad_token_id": 0, "max_position_embeddings": 128}  # fmt: skip
SMALL = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip


@torch.no_grad()
def logits(model: Any) -> Tensor:
    batch = padded_batch()
    found: Tensor = model(**batch).logits[batch["attention_mask"].bool()]
    return found


def attentions(model: nn.Module) -> list[Any]:
    return [site for site in model.accelpatch.report().sites if site.role == "attention"]  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gemma3", "opt", "gpt2", "gpt_neox", "phi3", "qwen3_moe"]
)
def test_families_beside_stock(name: str) -> None:
    model = CAUSAL[name].make()
    config = model.config
    due, text = logits(model), model.generate(**padded_batch(), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    accelpatch.patch(model, "flash")
    assert {site.replacer for site in attentions(model)} == {"flash_attention"}
    assert model.config._attn_implementation == NAME
    torch.testing.assert_close(logits(model), due, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(**padded_batch(), max_new_tokens=8, do_sample=False), text)  # type: ignore[operator]
    accelpatch.unpatch(model)
    assert model.config is config
    assert torch.equal(logits(model), due)


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_scores_of_their_own_are_refused_with_the_reason(name: str) -> None:
    model = CAUSAL[name].make()
    accelpatch.patch(model, "flash", verify=False)
    for site in attentions(model):
        assert "computes its scores itself" in site.reason
    assert model.config._attn_implementation != NAME


def test_sinks() -> None:
    model = make("GptOss", **SINKS)
    due = logits(model)
    accelpatch.patch(model, "flash")
    assert {(site.replacer, site.kernel) for site in attentions(model)} == {("flash_attention", "eager")}
    torch.testing.assert_close(logits(model), due, rtol=1e-4, atol=1e-4)


def test_an_encoder_sees_both_ways() -> None:
    model = make("Bert", suffix="ForMaskedLM", **SMALL)
    due = logits(model)
    accelpatch.patch(model, "flash")
    sites = attentions(model)
    assert [(site.path.rpartition(".")[2], site.replacer) for site in sites] == [("self", "flash_attention")] * 2
    torch.testing.assert_close(logits(model), due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_cross_attention_and_relative_bias(family: str) -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "encoder_layers": 2,
             "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
             "decoder_ffn_dim": 96, "vocab_size": 160, "pad_token_id": 0, "decoder_start_token_id": 0,
             "eos_token_id": 2, "bos_token_id": 1, "forced_eos_token_id": None}  # fmt: skip
    model: Any = make(family, suffix="ForConditionalGeneration", **sizes)
    batch = padded_batch() | {
        "decoder_input_ids": torch.tensor([[0, 5, 7, 9]]).expand(len(padded_batch()["input_ids"]), -1)
    }
    with torch.no_grad():
        due = model(**batch).logits
        accelpatch.patch(model, "flash", inputs=[batch])
        found = model(**batch).logits
    sites = attentions(model)
    if family == "T5" and any(site.reason for site in sites):  # transformers before 5.23 computes T5's scores there
        assert all("computes its scores itself" in site.reason for site in sites)
    else:
        assert {site.replacer for site in sites} == {"flash_attention"}
        assert len(sites) == 6
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)


def test_a_model_of_the_same_configuration_is_not_changed() -> None:
    model = CAUSAL["llama"].make()
    other = type(model)(model.config).eval()
    due = logits(other)
    accelpatch.patch(model, "flash", verify=False)
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(logits(other), due)
    assert not any(isinstance(module, FlashAttention) for module in other.modules())


def test_where_some_stay_the_model_makes_its_own_masks() -> None:
    recipe = parse(
        "extends: flash\nrules:\n  - name: first\n    match: {name: 'model.layers.0.*', role: attention}\n"
        "    replace: keep\n"
    )
    model = CAUSAL["mistral"].make()
    due = logits(model)
    accelpatch.patch(model, recipe)
    assert [site.replacer for site in attentions(model)] == [None, "flash_attention"]
    assert model.config._attn_implementation == "sdpa"
    ran = dispatch.calls["flash_attention", "sdpa"]
    torch.testing.assert_close(logits(model), due, rtol=1e-4, atol=1e-4)
    assert dispatch.calls["flash_attention", "sdpa"] == ran + 1


def test_settings_that_were_changed_since_stay() -> None:
    model = CAUSAL["llama"].make()
    config = model.config
    accelpatch.patch(model, "flash", verify=False)
    model.config.use_cache, model.config.mine = False, 3
    model.config.id2label[5] = "five"
    accelpatch.unpatch(model)
    assert model.config is config
    assert (config.use_cache, config.mine, config._attn_implementation) == (False, 3, "sdpa")
    assert config.id2label[5] == "five"


def test_every_module_has_its_own_configuration_back() -> None:
    """Those too whose replacement was given the copy that names this attention: MLPs, rotary embeddings."""
    model = CAUSAL["llama"].make()
    before = {name: vars(module)["config"] for name, module in model.named_modules() if "config" in vars(module)}
    accelpatch.patch(model, "flash", verify=False)
    model.model.layers[1].mlp.config = mine = copy.copy(model.config)
    accelpatch.unpatch(model)
    after = {name: vars(module)["config"] for name, module in model.named_modules() if "config" in vars(module)}
    assert after.pop("model.layers.1.mlp") is mine
    assert before.pop("model.layers.1.mlp") is model.config
    assert {name: id(one) for name, one in after.items()} == {name: id(one) for name, one in before.items()}


def test_configurations_inside_others_are_those_of_their_models() -> None:
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    text = {**SMALL, "num_hidden_layers": 1}
    model: Any = make("Llava", suffix="ForConditionalGeneration", image_token_id=159, vision_config=CLIPVisionConfig(
        **vision, image_size=16, patch_size=8), text_config=LlamaConfig(**text))  # fmt: skip
    config, inner = model.config, model.config.text_config
    accelpatch.patch(model, "flash", verify=False)
    assert model.config.text_config is model.model.language_model.config is not inner
    assert model.config.vision_config is model.model.vision_tower.config
    for one in (model.config.text_config, model.config.vision_config):
        assert one._attn_implementation == NAME
    model.config.text_config.use_cache = False
    accelpatch.unpatch(model)
    assert model.config is config
    assert config.text_config is model.model.language_model.config is inner
    assert (inner.use_cache, inner._attn_implementation) == (False, "sdpa")


class Sized(nn.Module):
    """An attention module of these attributes, of a configuration with others."""

    def __init__(self, config: dict[str, int], **attributes: int) -> None:
        super().__init__()
        self.__dict__.update(attributes, config=SimpleNamespace(**config))


def test_sizes_of_a_module_whose_configuration_does_not_say_them() -> None:
    vision = spec_of(Sized({}, num_heads=4, head_dim=16))
    latent = spec_of(Sized({"num_attention_heads": 8}, head_dim=8, qk_head_dim=24))
    assert isinstance(vision, Spec)
    assert isinstance(latent, Spec)
    assert [(one.sizes["H"], one.sizes["D"]) for one in (vision, latent)] == [(4, 16), (8, 24)]
    assert spec_of(Sized({}, head_dim=16)) == "the size of the heads of Sized is not known"


def test_a_copy_is_patched_too() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "flash", verify=False)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied), logits(model))
    accelpatch.unpatch(copied)
    assert copied.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == NAME


def test_a_missing_package_is_a_reason_and_an_error_where_it_is_forced() -> None:
    with pytest.raises(PlanError, match="flash_attn_2: FlashAttention 2 runs on GPUs"):
        accelpatch.plan(CAUSAL["llama"].make(), parse(FORCED.format("flash_attn_2")))
    with pytest.raises(PlanError, match="there is no implementation 'fast'"):
        accelpatch.plan(CAUSAL["llama"].make(), parse(FORCED.format("fast")))
    plan = accelpatch.plan(CAUSAL["llama"].make(torch.bfloat16), "flash", device=devices.KNOWN["gfx942"])
    text = str(plan)
    for name in ("aiter", "flash_attn_2", "hub", "xformers"):
        assert f"  {name}: " in text
        assert "is not installed" in text


def test_a_forced_implementation_runs() -> None:
    model = CAUSAL["llama"].make()
    due = logits(model)
    accelpatch.patch(model, parse(FORCED.format("eager")))
    assert {site.kernel for site in attentions(model)} == {"eager"}
    ran = dispatch.calls["flash_attention", "eager"]
    torch.testing.assert_close(logits(model), due, rtol=1e-4, atol=1e-4)
    assert dispatch.calls["flash_attention", "eager"] == ran + 2


def test_training_after_the_patch_has_gradients() -> None:
    recipe = parse("name: a\nrules:\n  - {name: attention, match: {role: attention}, replace: flash_attention}\n")
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), recipe)
    batch = padded_batch()
    model.train()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    stock: Any = CAUSAL["llama"].make().train()
    stock(**batch, labels=batch["input_ids"]).loss.backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)


def test_another_implementation_can_be_set_on_a_patched_model() -> None:
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), "flash", verify=False)
    due = logits(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model), due, rtol=1e-4, atol=1e-4)
    assert transformers.AttentionInterface()[NAME] is not None
