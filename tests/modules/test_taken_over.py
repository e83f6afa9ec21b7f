"""A packed weight that two tied modules share stays whole once the one that owned it was replaced by another module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.modules.packed_weight import packed_in
from tests.support.packed import PATCHES, packed, plain
from tests.support.tiny import HIDDEN, VOCABULARY, full_batch

forms = pytest.mark.parametrize("form", PATCHES)
places = pytest.mark.parametrize("place", ["embedding", "head"])
REACH = {"int8": 0.05, "int4": 0.6, "fp8": 0.2, "compact": 0.05}
GENERATE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@torch.no_grad()
def out(model: Any) -> Tensor:
    found: Tensor = model(**full_batch()).logits
    return found


def put(model: Any, place: str, dtype: torch.dtype) -> Any:
    """The model with another embedding or head, which is not packed."""
    torch.manual_seed(1)
    weight = (torch.randn(VOCABULARY, HIDDEN) * HIDDEN**-0.5).to(dtype)
    if place == "embedding":
        model.set_input_embeddings(nn.Embedding.from_pretrained(weight))
    else:
        head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
        head.weight.data.copy_(weight)
        model.set_output_embeddings(head)
    return model


def case(form: str, place: str) -> tuple[Any, Any]:
    """A patched model of which one of two tied modules was replaced, and the same unpatched."""
    stock = plain("llama", form)
    return put(packed("llama", form), place, stock.dtype), put(stock, place, stock.dtype)


@forms
@places
def test_it_computes_as_before(place: str, form: str) -> None:
    model, stock = case(form, place)
    assert (out(model) - out(stock)).norm() < REACH[form] * out(stock).norm()
    due = model.generate(**full_batch(), **GENERATE)
    assert torch.equal(copy.deepcopy(model).generate(**full_batch(), **GENERATE), due)


@forms
@places
def test_a_copy_is_whole(place: str, form: str) -> None:
    model = case(form, place)[0]
    due, copied = out(model), copy.deepcopy(model)
    with torch.no_grad():
        for _, module in packed_in(model):
            module.weight.data.zero_()
    assert not torch.equal(out(model), due)
    assert torch.equal(out(copied), due)


@forms
@places
def test_a_cast_reaches_it(place: str, form: str) -> None:
    model, stock = case(form, place)
    due = out(model)
    model.to(torch.float64)
    assert out(model).dtype == torch.float64
    assert (out(model) - due).norm() < 1e-5 * due.norm() * (2**15 if stock.dtype == torch.bfloat16 else 1)


@forms
@places
def test_a_write_reaches_it(place: str, form: str) -> None:
    model = case(form, place)[0]
    left: Any = model.lm_head if place == "embedding" else model.model.embed_tokens
    before = out(model)
    left.weight.data.mul_(0.25)
    assert (out(model) - before).norm() > 0.01 * before.norm()


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@places
def test_it_is_saved_and_loaded(place: str, form: str, tmp_path: Path) -> None:
    model = case(form, place)[0]
    model.save_pretrained(tmp_path)
    assert torch.equal(out(accelpatch.load(str(tmp_path)).model), out(model))


@forms
@places
def test_unpatch_gives_the_other_back(place: str, form: str) -> None:
    model, stock = case(form, place)
    out(model)
    assert torch.equal(out(accelpatch.unpatch(model)), out(stock))
