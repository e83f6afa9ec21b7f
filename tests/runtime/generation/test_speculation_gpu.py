"""Prompt lookup in real graphs on a GPU: bit for bit what the same model makes without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.recipe.recipe import Runtime, parse
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime
from accelpatch.runtime.generation.speculation import ACCEPTED
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.drafting import anywhere, assert_same, generate, oracle, row, stock
from tests.support.tiny import CAUSAL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ends": {"eos_token_id": list(range(12)), "min_new_tokens": 30},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "host": {"repetition_penalty": 1.3, "output_logits": True, "output_scores": True},
}
NEW = 60


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_bits_without_it(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = CAUSAL[name].make(torch.bfloat16).cuda()
    accelpatch.patch(model, parse(f"extends: {recipe}\nruntime: {{speculate: prompt_lookup}}"), verify=False)
    drafting, plain = vars(model)[RUNTIME], new_runtime("cuda", Runtime())
    for length in (1, 9, 250):
        for way, options in WAYS.items():
            vars(model)[RUNTIME] = plain
            due = generate(model, row(length).cuda(), max_new_tokens=NEW, **options)
            vars(model)[RUNTIME] = drafting
            with monkeypatch.context() as context:
                oracle(context, due.sequences, anywhere(length))
                mine = generate(model, row(length).cuda(), max_new_tokens=NEW, **options)
            assert_same(mine, due)
            assert way != "greedy" or drafting.paths[ACCEPTED] > NEW // 2
    assert drafting.paths[CAPTURED] + drafting.paths[ACCEPTED] == plain.paths[CAPTURED]
    assert not any(path.startswith("stock loop") for path in drafting.paths)


def test_its_own_drafts_and_the_draws_of_the_stock_loop() -> None:
    model: Any = CAUSAL["mistral"].make().cuda()  # float32: no fused layers, so no drafts, and a reason
    accelpatch.patch(model, parse("extends: exact\nruntime: {speculate: prompt_lookup}"), verify=False)
    ids = row(20).repeat(1, 4).cuda()
    due = generate(stock(model), ids, do_sample=True, top_k=5)
    assert torch.equal(generate(model, ids, do_sample=True, top_k=5).sequences, due.sequences)
    assert "no prompt lookup: modules in the captured step" in model.accelpatch.report().paths
