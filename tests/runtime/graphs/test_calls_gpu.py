"""On a GPU: single calls that come again, as real graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

import accelpatch
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.calls import AS_FAST, CALL, RUNS
from tests.fusion.test_fused_layer import paths
from tests.patching.test_on_gpu import off, patched, recipes
from tests.runtime.graphs.test_calls import short
from tests.support.multimodal import MODELS
from tests.support.steps import stock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 100, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


@recipes
@torch.no_grad()
def test_prompts_that_come_again(recipe: str) -> None:
    model = patched(recipe)
    plain = stock(model)
    for rows, length in ((1, 5), (1, 5), (1, 8), (1, 1), (1, 1), (3, 2), (2, 40), (2, 60), (2, 64), (1, 300), (1, 310)):
        ids = tokens(rows, length, length)
        found, due = model(ids), plain(ids)
        assert off(found.logits.float(), due.logits.float()) < 0.03
        assert found.past_key_values.get_seq_length() == length
        pairs = (model, found), (plain, due)
        more = [one(ids[:, :2], past_key_values=out.past_key_values).logits.float() for one, out in pairs]
        assert off(*more) < 0.03
    assert (2, 64) in short(model)
    assert (1, 320) in short(model)
    ids = tokens(1, 310)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.model.layers[0].self_attn.o_proj.weight.data.mul_(-2)
    for _ in range(3):
        assert off(model(ids).logits.float(), stock(model)(ids).logits.float()) < 0.03


def bert(recipe: str) -> Any:
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(vocab_size=120, **SIZES)).to("cuda", torch.bfloat16).eval()
    return accelpatch.patch(model, recipe, verify=False)


def vit(recipe: str) -> Any:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, **SIZES))
    return accelpatch.patch(model.to("cuda", torch.bfloat16).eval(), recipe, verify=False)


def text(seed: int) -> dict[str, Tensor]:
    ids = tokens(4, 32, seed)
    mask = torch.ones_like(ids)
    if seed % 2:
        mask[0, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def image(seed: int) -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels.to("cuda", torch.bfloat16)}


ENCODERS: dict[str, tuple[Callable[[str], Any], Callable[[int], dict[str, Tensor]]]] = {
    "bert": (bert, text),
    "vit": (vit, image),
}


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoders(name: str, recipe: str) -> None:
    make, batch = ENCODERS[name]
    model = make(recipe)
    plain = stock(model)
    graphs = 2 if name == "bert" else 1  # with padding, and without a mask where there is none
    held = [(model(**batch(turn)).logits, plain(**batch(turn)).logits) for turn in range(6 * graphs)]
    assert paths(model)[CALL] == graphs * (6 - RUNS)
    for found, due in held:
        assert off(found.float(), due.float()) < 0.03
    found = model(**batch(0), output_hidden_states=True).hidden_states
    assert len(found) == SIZES["num_hidden_layers"] + 1
    accelpatch.unpatch(model)
    assert CALL not in getattr(model, "paths", {})


@torch.no_grad()
def test_other_streams_and_threads() -> None:
    model = bert("int8")
    due = [stock(model)(**text(turn)).logits.float() for turn in range(8)]
    found: dict[int, Tensor] = {}

    def calls(turns: range) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for turn in turns:
                found[turn] = model(**text(turn)).logits.float()
            torch.cuda.current_stream().synchronize()

    for _ in range(3):
        threads = [threading.Thread(target=calls, args=(range(first, 8, 2),)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(off(found[turn], due[turn]) < 0.03 for turn in range(8))
    assert paths(model)[CALL] > 0


@pytest.mark.parametrize("recipe", ["exact", "int8"])
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
@torch.no_grad()
def test_prompts_with_pictures(name: str, recipe: str) -> None:
    """Tower and language model as graphs, for pictures of two sizes."""
    model = MODELS[name][0]().to("cuda", torch.bfloat16)
    accelpatch.patch(model, recipe, verify=False)
    plain = stock(model)
    vars(plain)[CODE].runtime = None  # of the tower and the language model
    for turn in range(2 * (RUNS + 3)):
        given = {key: value.cuda() for key, value in MODELS[name][1](1 + turn % 2).items()}
        given["pixel_values"] = torch.randn_like(given["pixel_values"])
        found, due = (one(**given, use_cache=True).logits.float() for one in (model, plain))
        assert off(found, due) < 0.03
    said = paths(model)
    assert said.get(CALL) or f"no captured call: {AS_FAST}" in said, said
    prompts = vars(model)[RUNTIME].captured._embedded._captured.values()
    assert all(one._graph is not None for one in prompts)
