"""Models whose last layers read the keys and values of earlier ones, or whose layers have heads of several sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.cache_contents import storing
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.multimodal import TEXT

NEW = 20
TYPES = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120, "num_kv_shared_layers": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
ONE_PRODUCT = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
#: name -> (of the class, what its configuration has besides TEXT and TYPES)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", {"global_head_dim": 32, **PER_LAYER}),
    "gemma4 with experts": ("Gemma4", {"global_head_dim": 32, "num_kv_shared_layers": 0, **EXPERTS, **ONE_PRODUCT}),
    "gemma3n": (
        "Gemma3n",
        {"laurel_rank": 4, "altup_num_inputs": 2, "intermediate_size": [96] * 4, **PER_LAYER}
        | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
}


def made(name: str) -> Any:
    prefix, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}TextConfig")(**{**TEXT, **TYPES, **more})
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("machine", ["as a gpu"], indirect=True)
def test_two_turns(name: str, machine: str) -> None:
    """Tokens, and what the cache holds afterwards, are stock's; every token but the first is a captured step."""
    model = accelpatch.patch(made(name), "int8", verify=False, progress=False)
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = vars(plain)[CODE].runtime = None
    ids = torch.randint(5, 90, (2, 12))
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    found = []
    for one in (plain, model):
        first = one.generate(ids, return_dict_in_generate=True, **options)
        more = torch.cat([first.sequences, ids[:, :3]], dim=1)
        second = one.generate(more, return_dict_in_generate=True, **{CACHE: getattr(first, CACHE)}, **options)
        found.append(second)
    assert torch.equal(found[0].sequences, found[1].sequences)
    for due, mine in zip(*(storing(getattr(one, CACHE)) for one in found), strict=True):
        torch.testing.assert_close(mine.keys, due.keys)
        torch.testing.assert_close(mine.values, due.values)
    assert model.accelpatch.report().paths[CAPTURED] == 2 * (NEW - 1)


def test_a_plan_counts_the_heads_of_each_layer() -> None:
    """Two layers of 2 heads of 16, and two of 2 heads of 32: keys and values of one token."""
    model = made("gemma4 with experts")
    if not hasattr(model.config, "per_layer_config"):
        pytest.skip("this transformers has one configuration for all layers")
    plan = accelpatch.plan(model, "int8")
    assert plan.cache_bytes == 2 * 4 * (2 * 2 * 16 + 2 * 2 * 32) * plan.max_length


def test_a_plan_counts_no_layer_that_reads_what_others_cached() -> None:
    plan = accelpatch.plan(made("gemma3n"), "int8")
    assert plan.cache_bytes == 2 * 4 * (2 * 2 * 16) * plan.max_length
