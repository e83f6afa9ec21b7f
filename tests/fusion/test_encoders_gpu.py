"""Fused encoder layers on a GPU: by every recipe, with padding and without, beside stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME, WITHOUT_PADDING
from accelpatch.runtime.graphs.calls import CALL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYERS = 4
SIZES: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048,
                         "num_hidden_layers": LAYERS}  # fmt: skip
#: the least cosine of hidden states beside stock's, random weights
LEAST = {"exact": 0.9999, "int8": 0.999, "smoothquant": 0.99, "fp8": 0.99}


def bert() -> Any:
    torch.manual_seed(0)
    return t.BertModel(t.BertConfig(vocab_size=999, **SIZES)).eval().to("cuda", torch.bfloat16)


def vit() -> Any:
    torch.manual_seed(0)
    return t.ViTModel(t.ViTConfig(image_size=64, patch_size=8, **SIZES)).eval().to("cuda", torch.bfloat16)


def padded(batch: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, length + 1, (batch,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(3, 990, (batch, length), generator=generator)
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(**inputs).last_hidden_state
    return made


def cosine(one: Tensor, other: Tensor) -> float:
    return float(nn.functional.cosine_similarity(one.float(), other.float(), dim=-1).min())


@pytest.mark.parametrize("recipe", LEAST)
def test_text(recipe: str) -> None:
    large, small = padded(64, 256), padded(4, 32)
    model = bert()
    due = [run(model, inputs) for inputs in (large, small)]
    accelpatch.patch(model, recipe)
    assert f"{LAYERS} of {LAYERS} layers fused" in str(model.accelpatch.report())
    for _ in range(4):
        found = [run(model, inputs) for inputs in (large, small)]
    paths = vars(model)[RUNTIME].paths
    assert paths[WITHOUT_PADDING] == 4  # of the large batch alone: the small one is a graph
    assert paths[CALL] >= 1
    for inputs, one, other in zip((large, small), found, due, strict=True):
        kept = inputs["attention_mask"].bool()
        assert cosine(one[kept], other[kept]) >= LEAST[recipe]
    assert not found[0][~large["attention_mask"].bool()].any()
    accelpatch.unpatch(model)
    assert torch.equal(run(model, small), due[1])


@pytest.mark.parametrize("recipe", LEAST)
def test_pictures(recipe: str) -> None:
    inputs = {"pixel_values": torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()}
    model = vit()
    due = run(model, inputs)
    accelpatch.patch(model, recipe)
    assert f"{LAYERS} of {LAYERS} layers fused" in str(model.accelpatch.report())
    for _ in range(4):
        found = run(model, inputs)
    assert vars(model)[RUNTIME].paths[CALL] >= 1
    assert cosine(found, due) >= LEAST[recipe]


def test_float32_keeps_padding() -> None:
    model, inputs = bert().float(), padded(64, 256)
    due = run(model, inputs)
    accelpatch.patch(model, "exact")
    found = run(model, inputs)
    assert vars(model)[RUNTIME].paths[WITHOUT_PADDING] == 0
    assert cosine(found, due) > 0.9999
