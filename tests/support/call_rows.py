"""Rows of docs/patched-models.md about calls and the KV cache."""

from __future__ import annotations

from operator import is_
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from tests.support.packed import patch
from tests.support.rows import row, stock, undo
from tests.support.tiny import full_batch


def eager(form: str) -> Any:
    model = stock(form)
    model.set_attn_implementation("eager")
    return model


@row("ask for attention weights")
def _attention_weights(model: Any, form: str, folder: Path) -> None:
    for one in (patch(eager(form), form), accelpatch.patch(eager(form), "flash", verify=False)):
        for _ in range(2):
            weights = one(**full_batch(), output_attentions=True).attentions
            assert [tuple(each.shape) for each in weights] == [(*weights[0].shape[:2], 9, 9)] * 2
            if "accelpatch" in vars(one):
                undo(one)
    assert model(**full_batch(), output_attentions=True).attentions == ()


@row("`generate_batch`")
def _batches(model: Any, form: str, folder: Path) -> None:
    config = ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=64)
    if hasattr(config, "auto_switch_to_flash"):
        config.auto_switch_to_flash = False
    text = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    given = {"generation_config": text, "continuous_batching_config": config, "warmup": False}
    ids = full_batch()["input_ids"][:1]
    for one in (model, accelpatch.patch(stock(form), "flash", verify=False)):
        name = one.config._attn_implementation
        (made,) = one.generate_batch(ids.tolist(), **given).values()
        assert made.generated_tokens == one.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
        assert one.config._attn_implementation == name
        undo(one)
        assert one.config._attn_implementation == "sdpa"


@row("ask the KV cache")
def _cache(model: Any, form: str, folder: Path) -> None:
    found: list[int] = []
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(int(kwargs[CACHE].get_seq_length(1))), with_kwargs=True
    )
    for _ in range(2):
        found.clear()
        model.generate(**full_batch(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert found == [0, 9, 10, 11]
        if "accelpatch" in vars(model):
            undo(model)


@row("change a KV cache")
def _caches(model: Any, form: str, folder: Path) -> None:
    def step(cache: DynamicCache, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, model(ids, **{CACHE: cache}).logits[:, -1])

    prompt, token = full_batch()["input_ids"], torch.full((3, 1), 5)
    due, cache = DynamicCache(), DynamicCache()
    for one, last in ((due, 0), (cache, 1)):
        step(one, prompt)
        held = list(one.layers)
        for _ in range(1 + last):
            step(one, token)
        one.crop(-last)
    torch.testing.assert_close(step(cache, token + 1), step(due, token + 1), rtol=1e-4, atol=1e-4)
    assert all(map(is_, held, cache.layers))
    undo(model)
    assert step(cache, token).isfinite().all()
    assert [layer.keys.shape[2] for layer in cache.layers] == [prompt.shape[1] + 3] * len(held)


@row("`torch.export`")
def _export(model: Any, form: str, folder: Path) -> None:
    given = {**full_batch(), "use_cache": False}
    with torch.no_grad():
        due = model(**given).logits
        torch.export.save(torch.export.export(model, (), given), folder / "program.pt2")
        found = torch.export.load(folder / "program.pt2").module()(**given).logits
        torch.testing.assert_close(found, due)
        torch.testing.assert_close(model(**given).logits, due)
        undo(model)
        torch.export.export(model, (), given)
