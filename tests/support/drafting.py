"""Models that draft beside models that do not, for tests of prompt lookup on a CPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.ops.linear import fused_linear
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.generation import speculation
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.generation.speculation import DRAFTS
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL

RULES = {
    "exact": "",
    "int8": "rules: [{name: linear, replace: int8_weight_only, options: {group_size: null}}]",
    "int4": "rules: [{name: linear, replace: int4_weight_only, options: {group_size: 32, symmetric: false}}]",
}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured, weights lie as on a GPU, and a product gives a row the same bits among others and alone."""
    whole = fused_linear.FusedLinear._by_operations

    def row_by_row(self: Any, x: Tensor, norm: Any, gate: Any, residual: Tensor | None) -> Tensor:
        beside = [None] * len(x) if residual is None else residual.split(1)
        return torch.cat([whole(self, one, norm, gate, its) for one, its in zip(x.split(1), beside, strict=True)])

    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    with_tiles(monkeypatch)
    monkeypatch.setattr(fused_linear.FusedLinear, "_by_operations", row_by_row)


def repeating(name: str) -> Any:
    """A tiny model whose next token hangs on the last one, and a little on others: its answers run in circles."""
    model: Any = CAUSAL[name].make()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.005)
    return model


def pair(name: str = "llama", rules: str = "exact", more: str = "") -> tuple[Any, Any]:
    """The same patched model twice: with prompt lookup, and without."""
    texts = [f"extends: {rules}\nruntime: {{speculate: {one}{more}}}\n{RULES[rules]}" for one in WITH_AND_WITHOUT]
    drafting, plain = (accelpatch.patch(repeating(name), parse(text), verify=False) for text in texts)
    return drafting, plain


WITH_AND_WITHOUT = ("prompt_lookup", "off")


def stock(model: Any) -> Any:
    """A copy of the patched model that runs transformers' own loop."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def row(length: int = 9, seed: int = 1) -> Tensor:
    """Tokens [1, length]."""
    return torch.randint(2, 150, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: Tensor, seed: int = 5, **options: Any) -> Any:
    """One call with everything that can be asked for."""
    torch.manual_seed(seed)
    given = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**given, **options})


def paths(model: Any) -> dict[str, int]:
    """What steps ran; how prompts were read is tested elsewhere."""
    return {path: count for path, count in model.accelpatch.report().paths.items() if "prefill" not in path}


def assert_same(mine: Any, due: Any) -> None:
    """Results of generate(), bit for bit, with scores and logits where they are and the cache."""
    assert torch.equal(mine.sequences, due.sequences)
    for name in ("scores", "logits"):
        for one, other in zip(mine.get(name, ()), due.get(name, ()), strict=True):
            assert torch.equal(one, other), name
    assert mine.past_key_values.get_seq_length() == due.past_key_values.get_seq_length()
    for one, other in zip(mine.past_key_values.layers, due.past_key_values.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


class Oracle:
    """Drafts of a known answer, all right up to a place that `right` gives, then wrong."""

    def __init__(self, answer: Tensor, right: Iterator[int]):
        self._answer, self._right = answer[0].tolist() + [1] * DRAFTS, right

    def draft(self, lookup: speculation.PromptLookup) -> list[int] | None:
        """As the lookup's own. A negative place: no draft."""
        right, length = next(self._right), len(lookup)
        if right < 0:
            return None
        found = self._answer[length : length + DRAFTS]
        return [token if place < right else (token + 1) % 150 for place, token in enumerate(found)]


def oracle(monkeypatch: pytest.MonkeyPatch, answer: Tensor, right: Iterator[int]) -> None:
    """Drafts are those of an oracle from now on."""
    oracle = Oracle(answer, right)
    monkeypatch.setattr(speculation.PromptLookup, "draft", lambda lookup: oracle.draft(lookup))


def anywhere(seed: int) -> Iterator[int]:
    """Places for an oracle, one in five of them no draft."""
    draw = random.Random(seed)
    while True:
        yield -1 if draw.random() < 0.2 else draw.randrange(DRAFTS + 1)
