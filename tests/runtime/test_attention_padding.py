"""Queries that see no key, in models with this package's attention: they get what the model's own gave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

import accelpatch
from accelpatch.kernels import dispatch
from accelpatch.modules.attention import FlashAttention, attention_forward
from accelpatch.recipe.recipe import parse
from tests.support.nested import bart, gemma3, llava, t5, two_texts, with_picture, with_typed_picture
from tests.support.tiny import CAUSAL, padded_batch

SIZES: dict[str, Any] = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 96, "pad_token_id": 0}  # fmt: skip
TEXT = "extends: flash\nrules:\n  - name: first\n    match: {name: '*layers.0.*', role: attention}\n    replace: keep\n"
RECIPES: dict[str, Any] = {"flash": "flash", "partly": parse(TEXT)}


def bert() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES)).eval()


def modernbert() -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"local_attention": 4, "global_attn_every_n_layers": 2, "eos_token_id": 2, "bos_token_id": 1}
    more |= {"cls_token_id": 1, "sep_token_id": 2}
    return ModernBertModel(ModernBertConfig(**SIZES, **more)).eval()


def _padded(first: int, last: int) -> Callable[[], dict[str, Tensor]]:
    """A row of text beside one that has text from `first` to `last` alone."""

    def batch() -> dict[str, Tensor]:
        ids = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(0))
        at = torch.arange(12)
        return {"input_ids": ids, "attention_mask": torch.stack((at >= 0, (at >= first) & (at < last))).long()}

    return batch


def _hole() -> dict[str, Tensor]:
    batch = padded_batch()
    batch["attention_mask"][:, 5] = 0
    return batch


def _empty_source() -> dict[str, Tensor]:
    batch = two_texts()
    batch["attention_mask"][0] = 0
    return batch


def _after_padding(batch: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    def made() -> dict[str, Tensor]:
        pads = torch.zeros(1, 3, dtype=torch.int64)
        both = {name: torch.cat((pads, one), 1) for name, one in batch.items() if name != "pixel_values"}
        return batch | both

    return made


DECODERS = [one.make for one in CAUSAL.values()]


#: a model, and a batch in which some queries see no key
CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "llama, left": (CAUSAL["llama"].make, padded_batch),
    "llama, a hole": (CAUSAL["llama"].make, _hole),
    "mistral, right by more than a window": (CAUSAL["mistral"].make, _padded(0, 2)),
    "gemma2, left": (CAUSAL["gemma2"].make, padded_batch),
    "gpt2, left": (CAUSAL["gpt2"].make, padded_batch),
    "bert, a row of padding": (bert, _padded(12, 12)),
    "modernbert, right by more than a window": (modernbert, _padded(0, 3)),
    "bart, no source": (bart, _empty_source),
    "t5, no source": (t5, _empty_source),
    "llava, left": (llava, _after_padding(with_picture())),
    "gemma3, left": (gemma3, _after_padding(with_typed_picture())),
}


def pair(make: Callable[[], Any], implementation: str, recipe: Any, batch: dict[str, Tensor]) -> tuple[Any, Any]:
    stock, model = make(), make()
    for one in (stock, model):
        one.set_attn_implementation(implementation)
    return stock, accelpatch.patch(model, recipe, inputs=[batch], verify=False)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_place_is_that_of_stock(name: str, implementation: str, recipe: str, machine: str) -> None:
    make, batch = CASES[name]
    if implementation == "sdpa" and name.startswith("gemma2"):
        pytest.skip("sdpa has no softcap")
    if recipe == "partly" and not any("layers.0." in key for key, _ in make().named_modules()):
        pytest.skip("its layers have another name")
    stock, model = pair(make, implementation, RECIPES[recipe], batch())
    if not any(isinstance(one, FlashAttention) for one in model.modules()):
        pytest.skip("T5 computes its scores itself before transformers 5.23")
    for _ in range(3):  # on a GPU the third one is a graph's
        ran = _ran()
        found, due = (one(**batch(), output_hidden_states=True) for one in (model, stock))
        assert _ran() > ran or (machine != "cpu" and make in DECODERS)  # whose layers are fused there
        for key in due:
            if isinstance(due[key], Tensor) or "states" in key:
                torch.testing.assert_close(found[key], due[key], rtol=1e-4, atol=1e-4)


def _ran() -> int:
    return sum(count for key, count in dispatch.calls.items() if key[0] == "flash_attention")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama, left", "gpt2, left", "bert, a row of padding"])
@torch.no_grad()
def test_16_bits(name: str, dtype: torch.dtype) -> None:
    make, batch = CASES[name]
    stock, model = pair(lambda: make().to(dtype), "eager", "flash", batch())
    found, due = (one(**batch(), output_hidden_states=True) for one in (model, stock))
    torch.testing.assert_close(found.hidden_states, due.hidden_states, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_sinks_take_all_of_it() -> None:
    """The softmax has one more term than keys."""
    model: Any = CAUSAL["llama"].make()
    model.set_attn_implementation("eager")
    attention = accelpatch.patch(model, "flash", verify=False).model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 3, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    mask = torch.tensor([[[[0, 0], [0, 2], [0, 3]]]], dtype=torch.int32)
    y, _ = attention_forward(attention, q, k, v, mask)
    torch.testing.assert_close(y[0, 0], v.mean(2)[0].repeat_interleave(2, 0))
    y, _ = attention_forward(attention, q, k, v, mask, s_aux=torch.zeros(4))
    assert not y[0, 0].any()


def test_gradients_reach_the_values() -> None:
    model: Any = CAUSAL["llama"].make()
    model.set_attn_implementation("eager")
    attention = accelpatch.patch(model, "flash", verify=False).model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 2, 16, requires_grad=True) for heads in (4, 2, 2))
    y, _ = attention_forward(attention, q, k, v, torch.tensor([[[[0, 0], [0, 2]]]], dtype=torch.int32))
    y[:, 0].sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, torch.ones_like(v))
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()
