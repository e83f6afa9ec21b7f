"""Captured steps of encoder-decoders in real graphs on a GPU: the tokens of the stock loop over the same modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.calls import CALL
from accelpatch.runtime.graphs.encoder_decoder_prompt import CAPTURED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.encoder_decoders import FAMILIES, encoder_decoder, given_to, texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NEW = 32
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 4},
}


def on_gpu(given: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: one.cuda().to(dtype if one.is_floating_point() else one.dtype) for name, one in given.items()}


def stock(model: Any) -> Any:
    """A copy of the patched model without its runtime."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def patched(name: str, dtype: torch.dtype = torch.float32, recipe: str = "exact") -> Any:
    return accelpatch.patch(encoder_decoder(name, dtype, eos_token_id=None).cuda(), recipe, verify=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_every_family(name: str) -> None:
    model = patched(name)
    plain, given = stock(model), on_gpu(given_to(name))
    for way, options in WAYS.items():
        results = []
        for runner in (model, plain):
            torch.manual_seed(3)
            results.append(runner.generate(**given, max_new_tokens=NEW, **options))
        assert torch.equal(*results), way
    paths = model.accelpatch.report().paths
    assert not any(path.startswith("stock loop") for path in paths), paths
    assert paths[CAPTURED] == 3 * (NEW - 1), paths


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("name", ["flan-t5", "bart", "whisper"])
def test_logits_in_bfloat16(name: str, recipe: str) -> None:
    """At most twice as far from float32 as the stock loop over the same modules is, at the first steps' tokens."""
    model = patched(name, torch.bfloat16, recipe)
    plain = stock(model)
    made = []
    for runner in (model, plain):
        given = on_gpu(given_to(name), torch.bfloat16)
        options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        made.append(runner.generate(**given, **options))
    logits = [torch.stack(one.logits[:2]).double() for one in made]
    assert (logits[0] - logits[1]).norm() <= 2**-5 * logits[1].norm()
    assert model.accelpatch.report().paths[CAPTURED] == 7
    assert model.accelpatch.report().paths["fused layers"] == 7


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "umt5"])
def test_fused_layers_are_as_their_modules(name: str, recipe: str) -> None:
    """Verified at the patch, all layers; few rows and more than a launch takes, with beams, over 32 steps."""
    model = accelpatch.patch(encoder_decoder(name, torch.bfloat16, eos_token_id=None).cuda(), recipe)
    report = model.accelpatch.report()
    assert "2 of 2 layers fused" in str(report), report
    assert report.verification.fused_layers == 2
    for times in (1, 5):
        given = on_gpu({key: one.repeat_interleave(times, 0) for key, one in given_to(name).items()}, torch.bfloat16)
        for options in ({}, {"num_beams": 3}):
            made = model.generate(**given, max_new_tokens=NEW, do_sample=False, **options)
            assert made.shape[1] >= NEW
    assert not [path for path in report.paths if path.startswith("stock loop")], report.paths


@pytest.mark.parametrize("name", ["t5", "m2m100", "whisper"])
def test_what_comes_again_is_captured_whole(name: str) -> None:
    model = patched(name)
    plain = stock(model)
    for place in range(5):
        given = on_gpu(given_to(name))
        given = {key: one.roll(place, -1) if one.is_floating_point() else one for key, one in given.items()}
        if "input_ids" in given:
            given["input_ids"] = (given["input_ids"] + place) % 150 * given["attention_mask"]
        made, due = (one.generate(**given, max_new_tokens=NEW, do_sample=False) for one in (model, plain))
        assert torch.equal(made, due), place
    paths = model.accelpatch.report().paths
    assert (paths[CALL], paths[CAPTURED_PROMPT]) == (3, 4), paths


def test_texts_of_several_lengths_in_turn() -> None:
    model = patched("t5")
    plain = stock(model)
    for length in (40, 11, 64, 65, 9, 130, 40):
        given = on_gpu(texts(length))
        made, due = (one.generate(**given, max_new_tokens=NEW, do_sample=False) for one in (model, plain))
        assert torch.equal(made, due), length
