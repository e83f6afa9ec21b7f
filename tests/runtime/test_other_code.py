"""Code of others in the place of transformers' and torch's: it runs, in every path, and the rest stays fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.models.gemma2.modeling_gemma2 as gemma2
import transformers.models.gpt2.modeling_gpt2 as gpt2
import transformers.models.llama.modeling_llama as llama
from torch import Tensor, nn
from transformers import masking_utils
from transformers.activations import SiLUActivation
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere import modeling_cohere

import accelpatch
from tests.support.other_code import assert_alike, last_logits, scaled, steps
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, full_batch, padded_batch

Patch = Callable[[pytest.MonkeyPatch], None]


def of(owner: Any, name: str, factor: float = 0.75) -> Patch:
    return lambda m: m.setattr(owner, name, scaled(getattr(owner, name), factor))


def _windowed(mask: Callable[..., Any]) -> Any:
    """A mask that hides all but four sinks and the last four keys."""

    def other(*args: Any, **kwargs: Any) -> Any:
        seen = mask(*args, **kwargs | {"allow_is_causal_skip": False})
        keys, queries = seen.shape[-1], seen.shape[-2]
        near = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None] - 4
        return seen & (near | (torch.arange(keys) < 4))

    return other


def _sinks(attention: Callable[..., Any]) -> Any:
    """Attention that keeps four sinks and a window in decode steps alone."""

    def other(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        if q.shape[2] == 1 and k.shape[2] > 8:
            k, v = (torch.cat((one[:, :, :4], one[:, :, -4:]), 2) for one in (k, v))
            mask = None
        return attention(module, q, k, v, mask, **kwargs)

    return other


def _hiding_the_last(update: Callable[..., Any]) -> Any:
    def other(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(self, keys, 0.5 * values, *args, **kwargs)

    return other


ENTRY = "sdpa"
CASES: dict[str, Patch] = {
    "a norm": of(llama.LlamaRMSNorm, "forward"),
    "a norm, by length": lambda m: m.setattr(
        llama.LlamaRMSNorm, "forward",
        (lambda old: lambda self, x: old(self, x) * (0.5 if x.shape[1] > 4 else 1))(llama.LlamaRMSNorm.forward),
    ),
    "an MLP": of(llama.LlamaMLP, "forward"),
    "a layer": of(llama.LlamaDecoderLayer, "forward"),
    "a layer's base": of(llama.LlamaDecoderLayer, "__call__"),
    "an attention": of(llama.LlamaAttention, "forward"),
    "a rotary embedding": of(llama.LlamaRotaryEmbedding, "forward"),
    "the rotation": of(llama, "apply_rotary_pos_emb"),
    "another family's rotation": lambda m: m.setattr(llama, "rotate_half", modeling_cohere.rotate_half),
    "the decoder": of(llama.LlamaModel, "forward"),
    "the model": of(llama.LlamaForCausalLM, "forward"),
    "linear layers": of(nn.Linear, "forward"),
    "linear layers, below": of(nn.functional, "linear"),
    "embeddings": of(nn.Embedding, "forward"),
    "an activation": of(SiLUActivation, "forward"),
    "an activation, below": of(nn.functional, "silu"),
    "a property": lambda m: m.setattr(
        llama.LlamaRMSNorm, "variance_epsilon", property(lambda self: 0.5, lambda self, value: None), raising=False
    ),
    "a child by a class attribute": lambda m: m.setattr(llama.LlamaMLP, "act_fn", nn.ReLU(), raising=False),
    "every module": of(nn.Module, "__call__", 0.99),
    "code in place": lambda m: m.setattr(
        llama.LlamaMLP.forward, "__code__", (lambda self, x: self.down_proj(self.up_proj(x))).__code__
    ),
    "attention's function": lambda m: m.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping, ENTRY, _sinks(ALL_ATTENTION_FUNCTIONS[ENTRY])
    ),
    "attention's function, registered": lambda m: m.setitem(
        type(ALL_ATTENTION_FUNCTIONS)._global_mapping, ENTRY, _sinks(ALL_ATTENTION_FUNCTIONS[ENTRY])
    ),
    "torch's attention": of(nn.functional, "scaled_dot_product_attention"),
    "masks": lambda m: m.setitem(
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, ENTRY, _windowed(masking_utils.sdpa_mask)
    ),
    "masks, by their maker": lambda m: m.setattr(
        llama, "create_causal_mask",
        lambda *args, old=llama.create_causal_mask, **kwargs: _windowed(masking_utils.sdpa_mask)(
            len(args[1] if len(args) > 1 else kwargs["inputs_embeds"]),
            (args[1] if len(args) > 1 else kwargs["inputs_embeds"]).shape[1],
            (args[1] if len(args) > 1 else kwargs["inputs_embeds"]).shape[1]
            + (0 if (held := kwargs.get("past_key_values", kwargs.get("cache"))) is None else held.get_seq_length()),
            q_offset=0 if held is None else held.get_seq_length(),
        ),
    ),
    "caches": lambda m: m.setattr(DynamicLayer, "update", _hiding_the_last(DynamicLayer.update)),
}  # fmt: skip


@pytest.mark.each_value
@spread("case, recipe", list(CASES), ["exact", "flash"])
def test_code_that_others_put_in_place_runs(
    case: str, recipe: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    accelpatch.patch(model, recipe, verify=False)
    assert_alike(model, plain, full_batch())
    assert steps(model) > 0
    with monkeypatch.context() as m:
        before = last_logits(plain)
        CASES[case](m)
        assert not torch.allclose(last_logits(plain), before)  # the case is one
        for batch in (full_batch(), padded_batch()):
            assert_alike(model, plain, batch)
        reasons = [name for name in model.accelpatch.report().paths if "not the code of its package" in name]
        assert reasons
        assert steps(model) == 0
    assert_alike(model, plain, full_batch())
    assert steps(model) > 0
    accelpatch.unpatch(model)


@pytest.mark.each_value
@spread("case, recipe", list(CASES), ["exact", "flash"])
def test_code_that_others_put_in_place_before_the_patch_runs(
    case: str, recipe: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    with monkeypatch.context() as m:
        CASES[case](m)
        accelpatch.patch(model, recipe, verify=False)
        assert_alike(model, plain, padded_batch())
        assert steps(model) == 0
    assert_alike(model, plain, padded_batch())  # what is replaced goes on, what was kept stays
    accelpatch.unpatch(model)


OTHER_FAMILIES: dict[str, tuple[str, Patch]] = {
    "Gemma 2's norm, by its helper": ("gemma2", of(gemma2.Gemma2RMSNorm, "_norm")),
    "Gemma 2's MLP": ("gemma2", of(gemma2.Gemma2MLP, "forward")),
    "GPT-2's MLP": ("gpt2", of(gpt2.GPT2MLP, "forward")),
    "GPT-2's attention": ("gpt2", of(gpt2.GPT2Attention, "forward")),
    "torch's LayerNorm": ("gpt2", of(nn.LayerNorm, "forward")),
    "torch's layer norm": ("gpt2", of(nn.functional, "layer_norm")),
}


@pytest.mark.parametrize("case", OTHER_FAMILIES)
def test_code_in_other_families_runs(case: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, patch = OTHER_FAMILIES[case]
    plain, model = CAUSAL[name].make(), CAUSAL[name].make()
    accelpatch.patch(model, "exact", verify=False)
    assert_alike(model, plain, full_batch())
    patch(monkeypatch)
    assert_alike(model, plain, padded_batch())


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_packed_layers_run_other_code_on_their_own_weights(
    recipe: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, recipe, verify=False)
    before = last_logits(model)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * nn.functional.linear(x, self.weight, self.bias))
    found = last_logits(model)
    assert not torch.allclose(found, before)
    monkeypatch.undo()
    monkeypatch.setattr(nn.functional, "linear", scaled(nn.functional.linear, 2.0))
    torch.testing.assert_close(last_logits(model), found, rtol=1e-4, atol=1e-4)
