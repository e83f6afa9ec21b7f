"""Fused layers in real graphs on a GPU: the logits of the stock loop over the same patched modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import accelpatch
from accelpatch.recipe import parse
from accelpatch.runtime.captured_runtime import CAPTURED
from accelpatch.runtime.fused_layer import FUSED
from accelpatch.runtime.fused_prompt import FUSED_PROMPT
from accelpatch.runtime.patched_model import RUNTIME
from tests.families.tiny import CAUSAL, full_batch, padded_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NEW = 32
NAMES = ("llama", "mistral", "qwen2", "qwen3")
SYMMETRIC = """
extends: int4
rules:
  - name: linear
    replace: int4_weight_only
    options: {group_size: 32, symmetric: true}
"""
RECIPES: dict[str, Any] = {"exact": "exact", "int8": "int8", "int4": "int4", "int4-symmetric": parse(SYMMETRIC)}


class Given(LogitsProcessor):
    """Makes both loops take the same tokens, whatever the last bits of their logits say."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = (ids.shape[1] * 7 + torch.arange(len(ids), device=ids.device)) % (scores.shape[1] - 2) + 2
        return torch.full_like(scores, float("-inf")).scatter(1, chosen[:, None], 0.0)


def logits(model: Any, batch: dict[str, torch.Tensor], new: int = NEW) -> torch.Tensor:
    """[steps, B, V] in float64."""
    made = model.generate(
        **{key: value.cuda() for key, value in batch.items()}, max_new_tokens=new, do_sample=False, output_logits=True,
        return_dict_in_generate=True, logits_processor=LogitsProcessorList([Given()]),
    )  # fmt: skip
    return torch.stack(made.logits).double()


def assert_float_rule(model: Any, batch: dict[str, torch.Tensor], new: int = NEW) -> None:
    """Fused layers are at most twice as far from float32 as the modules of the patched model are."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    exact = logits(copy.deepcopy(plain).float(), batch, new)
    modules, fused, again = (
        ((logits(one, batch, new) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max().item()
        for one in (plain, model, model)  # a prompt's length that comes again is captured
    )
    assert max(fused, again) <= 2 * modules + 2**-8, (fused, again, modules)
    assert fused < 0.1, fused
    paths = model.accelpatch.report().paths
    assert paths[FUSED] == paths[CAPTURED] == 2 * (new - 1), paths
    assert paths[FUSED_PROMPT] == 2, paths


@pytest.mark.parametrize("make", [full_batch, padded_batch], ids=["one-length", "left-padding"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, recipe: Any, make: Any) -> None:
    model = CAUSAL[name].make(torch.bfloat16).cuda()
    assert_float_rule(accelpatch.patch(model, recipe, verify=False), make())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_more_rows_than_one_launch_reads(recipe: Any) -> None:
    model = CAUSAL["llama"].make(torch.bfloat16).cuda()
    ids = torch.randint(2, 90, (20, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[3, :7] = 0
    assert_float_rule(accelpatch.patch(model, recipe, verify=False), {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("size", [64, 80, 128])
def test_head_sizes_and_a_cache_of_several_runs(size: int) -> None:
    changes = {"head_dim": size, "hidden_size": 256, "max_position_embeddings": 1024, "sliding_window": None}
    model = CAUSAL["mistral"].make(torch.bfloat16, **changes).cuda()
    ids = torch.randint(2, 150, (2, 500), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :300] = 0
    accelpatch.patch(model, "exact", verify=False)
    assert_float_rule(model, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_weights_are_held_once_and_come_back(recipe: Any) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    model: Any = CAUSAL["llama"].make(torch.bfloat16, **shape).cuda()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelpatch.patch(model, recipe, verify=False)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    allocated = torch.cuda.memory_allocated()
    logits(model, full_batch(), 8)
    del vars(model)[RUNTIME]._steps, vars(model)[RUNTIME]._batches
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < allocated + (4 << 20)  # of 26 MiB of bf16, or 7 of int4
    assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())
    vars(model)[RUNTIME].close()
    accelpatch.unpatch(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
