"""Fused layers in real graphs on a GPU: the logits of the stock loop over the same patched modules."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.fusion import read_layers
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.capture import _own_workspaces
from tests.support.steps import assert_float_rule, logits, silence
from tests.support.tiny import CAUSAL, full_batch, padded_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NAMES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
SYMMETRIC = """
extends: int4
rules:
  - name: linear
    replace: int4_weight_only
    options: {group_size: 32, symmetric: true}
"""
RECIPES: dict[str, Any] = {
    "exact": "exact",
    "compact": "compact",
    "int8": "int8",
    "int4": "int4",
    "int4-symmetric": parse(SYMMETRIC),
}


@pytest.mark.parametrize("make", [full_batch, padded_batch], ids=["one-length", "left-padding"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, recipe: Any, make: Any) -> None:
    model = CAUSAL[name].make(torch.bfloat16).cuda()
    assert_float_rule(accelpatch.patch(model, recipe, verify=False), make())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "attn_implementation": "eager"}),
        ("phi3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    ],
    ids=["caps", "partial"],
)
def test_caps_and_partial_rotary(name: str, changes: dict[str, Any]) -> None:
    model = CAUSAL[name].make(torch.bfloat16, **changes).cuda()
    assert_float_rule(accelpatch.patch(model, "exact", verify=False), padded_batch())


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "phi": ("phi", {}),
    "starcoder2": ("starcoder2", {}),
    "opt": ("opt", {"word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", {}),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_layer_norms_parallel_layers_and_plain_mlps(form: str, recipe: Any) -> None:
    name, changes = FORMS[form]
    model = CAUSAL[name].make(torch.bfloat16, **changes).cuda()
    assert_float_rule(accelpatch.patch(model, recipe, verify=False), padded_batch())


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_these_forms_pass_their_verification(form: str) -> None:
    name, changes = FORMS[form]
    model: Any = accelpatch.patch(CAUSAL[name].make(torch.bfloat16, **changes).cuda(), "exact")
    layers = [site for site in model.accelpatch.report().sites if site.role == "layer"]
    assert layers
    assert [site.by_modules for site in layers if not site.fused] == []


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("form", FORMS)
def test_twenty_rows_of_these_forms(form: str, recipe: str) -> None:
    name, changes = FORMS[form]
    model = CAUSAL[name].make(torch.bfloat16, **changes).cuda()
    ids = torch.randint(2, 90, (20, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_float_rule(accelpatch.patch(model, recipe, verify=False), batch)


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
    _own_workspaces()  # cuBLAS's, of which each stream may have one, are not weights
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    logits(model, full_batch(), 8)
    del vars(model)[RUNTIME].captured._steps, vars(model)[RUNTIME].captured._batches
    gc.collect()
    torch.cuda.synchronize()
    _own_workspaces()
    assert torch.cuda.memory_allocated() < allocated + (4 << 20)  # of 26 MiB of bf16, or 7 of int4
    assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())
    vars(model)[RUNTIME].close()
    accelpatch.unpatch(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_bits_of_kernels_that_wait(recipe: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that begins with q and k, and `down` with its first columns, while the products before still run."""
    shape = {
        "hidden_size": 1024, "intermediate_size": 9216, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 1024, "sliding_window": None,
    }  # fmt: skip
    ids = torch.randint(2, 90, (rows, 300), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][-1, : 7 * (rows - 1)] = 0
    base, found = CAUSAL["mistral"].make(torch.bfloat16, **shape).cuda(), []
    for waits in (False, True):
        with monkeypatch.context() as patch:
            if waits:
                patch.setattr(read_layers, "with_signals", silence)
            model: Any = accelpatch.patch(copy.deepcopy(base), recipe, verify=False)
            found.append(logits(model, batch, 200))
        signals = [
            one.producer for layer in vars(model)[RUNTIME].captured.fused.layers for one in (layer.qkv, layer.gate_up)
        ]
        assert all((one is None) == waits for one in signals)  # so attention is the device library's
        assert not any(int(one.number.abs().sum()) for one in signals if one is not None)
    assert torch.equal(*found)
