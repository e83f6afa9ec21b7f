"""Attention weights of models with this package's attention: the originals' make them, as stock does or does not."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.masking_utils import create_causal_mask

import accelpatch
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.modules.attention_settings import NAME
from accelpatch.recipe.recipe import parse
from tests.support.nested import bart, llava, t5, two_texts, with_picture
from tests.support.tiny import CAUSAL, full_batch, padded_batch

TEXT = "extends: flash\nrules:\n  - name: first\n    match: {name: 'model.layers.0.*', role: attention}\n"
PARTLY = parse(TEXT + "    replace: keep\n")
RECIPES: dict[str, Any] = {"exact": "exact", "flash": "flash", "partly": PARTLY}
ASKED = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 3, "do_sample": False}
KINDS = ("encoder_attentions", "decoder_attentions", "cross_attentions")


def made(name: str = "llama", implementation: Any = "eager") -> Any:
    model: Any = CAUSAL[name].make()
    model.set_attn_implementation(implementation)
    return model


def flat(weights: Any) -> list[Tensor]:
    if weights is None:
        return []
    return [weights] if isinstance(weights, Tensor) else [one for part in weights for one in flat(part)]


def assert_same(found: Any, due: Any, count: int | None = None) -> None:
    one, other = flat(found), flat(due)
    assert len(one) == len(other)
    assert count is None or len(one) == count
    for mine, stock in zip(one, other, strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-5)


def _call(model: Any) -> Any:
    return model(**padded_batch(), output_attentions=True).attentions


def _tuple(model: Any) -> Any:
    return model(**padded_batch(), output_attentions=True, return_dict=False)[-1]


def _of_a_part(model: Any) -> Any:
    return model.model(**padded_batch(), output_attentions=True).attentions


def _configured(model: Any) -> Any:
    vars(model.config)["_output_attentions"] = True  # as one that was loaded so
    return model(**padded_batch()).attentions


def _generate(model: Any, **options: Any) -> Any:
    return model.generate(**padded_batch(), **ASKED, **options).attentions


def _assisted(model: Any) -> Any:
    return model.generate(padded_batch()["input_ids"][:1], prompt_lookup_num_tokens=2, **ASKED).attentions


def _configured_for_generate(model: Any) -> Any:
    model.generation_config.output_attentions = True
    given = {name: value for name, value in ASKED.items() if name != "output_attentions"}
    return model.generate(**padded_batch(), **given).attentions


CALLS: dict[str, Callable[[Any], Any]] = {
    "call": _call, "tuple": _tuple, "part": _of_a_part, "config": _configured, "generate": _generate,
    "beams": functools.partial(_generate, num_beams=2), "assisted": _assisted,
    "static": functools.partial(_generate, cache_implementation="static"),
    "by configuration": _configured_for_generate,
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@torch.no_grad()
def test_a_model_that_was_loaded_with_eager_makes_them(call: Callable[[Any], Any], recipe: str, machine: str) -> None:
    due = call(made())
    model = accelpatch.patch(made(), RECIPES[recipe], verify=False)
    found = call(model)
    assert flat(due)
    assert_same(found, due)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["flash", "partly"])
@torch.no_grad()
def test_families(name: str, recipe: str) -> None:
    due = made(name)(**padded_batch(), output_attentions=True)
    model = accelpatch.patch(made(name), RECIPES[recipe], verify=False)
    found = model(**padded_batch(), output_attentions=True)
    assert_same(found.attentions, due.attentions, 2)
    torch.testing.assert_close(found.logits, due.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_other_calls_run_this_attention(implementation: str) -> None:
    model = accelpatch.patch(made("llama", implementation), "flash", verify=False)
    for _ in range(2):
        ran = sum(dispatch.calls[key] for key in dispatch.calls if key[0] == "flash_attention")
        model(**full_batch(), output_attentions=True)
        assert sum(dispatch.calls[key] for key in dispatch.calls if key[0] == "flash_attention") == ran
        model(**full_batch())
        assert sum(dispatch.calls[key] for key in dispatch.calls if key[0] == "flash_attention") == ran + 2
        assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("recipe", ["flash", "partly"])
@torch.no_grad()
def test_a_model_that_was_loaded_with_sdpa_makes_none_as_stock_does(recipe: str) -> None:
    stock, model = made("llama", "sdpa"), accelpatch.patch(made("llama", "sdpa"), RECIPES[recipe], verify=False)
    assert _call(stock) == _call(model) == ()
    assert _generate(stock) == _generate(model)
    for one in (stock, model):
        with pytest.raises(IndexError):
            _assisted(one)
        with pytest.raises(ValueError, match="Please set it to 'eager'"):
            one.config.output_attentions = True


@pytest.mark.parametrize("make", [bart, t5], ids=["bart", "t5"])
@torch.no_grad()
def test_encoders_and_decoders(make: Callable[[], Any]) -> None:
    """Also cross attentions, and the encoder called by itself."""
    stock, model = make(), make()
    for one in (stock, model):
        one.set_attn_implementation("eager")
    batch = two_texts()
    accelpatch.patch(model, "flash", inputs=[batch], verify=False)
    texts = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for call in (
        lambda one: one(**batch, output_attentions=True),
        lambda one: one.generate(**texts, **ASKED),
    ):
        due, found = call(stock), call(model)
        for kind in KINDS:
            assert flat(due[kind])
            assert_same(found[kind], due[kind])
    due, found = (one.get_encoder()(**texts, output_attentions=True) for one in (stock, model))
    assert_same(found.attentions, due.attentions, 2)


PARTS: dict[str, Any] = {
    "text": {"text_config": "eager", "vision_config": "sdpa"},
    "pictures": {"text_config": "sdpa", "vision_config": "eager"},
    "both": "eager",
}


@pytest.mark.parametrize("which", PARTS)
@torch.no_grad()
def test_each_model_inside_has_its_own_original(which: str) -> None:
    """By a dictionary: at the load, and on the patched model."""
    loaded, given, stock = llava(), llava(), llava()
    for one in (loaded, stock):
        one.set_attn_implementation(PARTS[which])
    for one in (loaded, given):
        accelpatch.patch(one, "flash", verify=False)
    given.set_attn_implementation(PARTS[which])
    batch = with_picture()
    for one in (loaded, given):
        due, found = (each(**batch, output_attentions=True) for each in (stock, one))
        assert_same(found.attentions, due.attentions, 0 if which == "pictures" else 2)
        torch.testing.assert_close(found.logits, due.logits, rtol=1e-4, atol=1e-4)
        due, found = (each.model.vision_tower(batch["pixel_values"], output_attentions=True) for each in (stock, one))
        assert_same(found.attentions, due.attentions, 0 if which == "text" else 2)


@pytest.mark.parametrize("recipe", ["flash", "partly"])
@torch.no_grad()
def test_another_implementation_on_a_patched_model(recipe: str) -> None:
    """Every attention module follows, and what was set is there after unpatch."""
    stock = made()
    due = _call(stock)
    model = accelpatch.patch(made("llama", "sdpa"), RECIPES[recipe], verify=False)
    model.set_attn_implementation("eager")
    assert_same(_call(model), due, 2)
    model.config.output_attentions = True
    assert_same(model(**padded_batch()).attentions, due, 2)
    torch.testing.assert_close(model(**padded_batch()).logits, stock(**padded_batch()).logits, rtol=1e-4, atol=1e-4)
    model.config.output_attentions = False
    model.set_attn_implementation("sdpa")
    assert _call(model) == ()
    model.set_attn_implementation("eager")
    accelpatch.unpatch(model)
    assert model.config._attn_implementation == "eager"
    assert_same(_call(model), due, 2)


@torch.no_grad()
def test_copies_and_the_model_after_unpatch_make_them_too() -> None:
    due = _call(made())
    model = accelpatch.patch(made(), "flash", verify=False)
    copied = copy.deepcopy(model)
    accelpatch.unpatch(model)
    for one in (copied, model):
        assert_same(_call(one), due, 2)


@torch.no_grad()
def test_threads_ask_for_themselves() -> None:
    """A call that asks for weights changes nothing for one that runs meanwhile, with masks of this attention."""
    model, batch = accelpatch.patch(made(), "flash", verify=False), padded_batch()
    plain, due = model(**batch).logits, _call(made())
    inside, go = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def stop(*args: Any) -> None:
        if threading.current_thread().name == "plain" and not inside.is_set():
            inside.set()
            go.wait(20)

    def run() -> None:
        with torch.no_grad():
            found["plain"] = model(**batch).logits

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    thread = threading.Thread(target=run, name="plain")
    thread.start()
    assert inside.wait(20)
    found["weights"] = _call(model)
    go.set()
    thread.join()
    handle.remove()
    assert_same(found["weights"], due, 2)
    assert torch.equal(found["plain"], plain)


@torch.no_grad()
def test_a_layer_alone() -> None:
    """With a mask of the caller's own it makes them; with one of this attention it says what to do."""
    stock, model = made(), accelpatch.patch(made(), "flash", verify=False)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    own = torch.full((5, 5), torch.finfo().min).triu(1)[None, None]
    for one in (stock, model):
        positions = one.model.rotary_emb(x, torch.arange(5)[None])
        one.made = one.model.layers[0].self_attn(
            x, position_embeddings=positions, attention_mask=own, output_attentions=True
        )
    assert_same(model.made[1], stock.made[1], 1)
    padding = torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
    mask = create_causal_mask(model.config, x, padding, None, None)
    with pytest.raises(KernelError, match=r"set_attn_implementation\('eager'\)"):
        model.model.layers[0].self_attn(x, position_embeddings=positions, attention_mask=mask, output_attentions=True)


@torch.no_grad()
def test_a_configuration_that_asks_for_them_is_saved(tmp_path: Path) -> None:
    model = made()
    model.config.output_attentions = True
    accelpatch.patch(model, "flash", verify=False)
    model.save_pretrained(tmp_path)
    assert '"output_attentions": true' in (tmp_path / "config.json").read_text()
    assert model.config._attn_implementation == NAME


def test_times_of_tokens() -> None:
    """Whisper reads them off its cross attentions, and takes eager for that itself."""
    config = WhisperConfig(
        vocab_size=160, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        median_filter_width=3,
    )  # fmt: skip
    sound, found = torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(0)), []
    for implementation in ("eager", "sdpa"):
        for recipe in (None, "flash"):
            torch.manual_seed(0)
            model: Any = WhisperForConditionalGeneration(config).eval()
            model.set_attn_implementation(implementation)
            options = {"alignment_heads": [[0, 0], [1, 2]], "no_timestamps_token_id": 150, "is_multilingual": False}
            model.generation_config.update(**options)
            for name, value in options.items():
                setattr(model.generation_config, name, value)
            if recipe:
                accelpatch.patch(model, recipe, verify=False)
            asked = {"return_token_timestamps": True, "return_timestamps": True}
            found.append(model.generate(sound, max_new_tokens=4, do_sample=False, **asked)["token_timestamps"])
    assert all(torch.equal(one, found[0]) for one in found)
