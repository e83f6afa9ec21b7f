"""Programs that know nothing of the patch: what only the original does is done by the original."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from tests.support.packed import plain, replacements
from tests.support.simulated import logits
from tests.support.tiny import full_batch

recipes = pytest.mark.parametrize("recipe", ["exact", "int8"])


def _ids() -> Any:
    return full_batch()["input_ids"]


def _trains_in_eval_mode(model: Any, folder: Path) -> Any:
    loss = model(input_ids=_ids(), labels=_ids()).loss
    loss.backward()
    return [p.grad for p in model.parameters()]


def _optimizer_first(model: Any, folder: Path) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(input_ids=_ids(), labels=_ids()).loss.backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _optimizer_of_named_groups(model: Any, folder: Path) -> Any:
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if ("norm" in n) == norms]} for norms in (True, False)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model(input_ids=_ids(), labels=_ids()).loss.backward()
    optimizer.step()
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def _gradient_of_the_input(model: Any, folder: Path) -> Any:
    x = model.get_input_embeddings()(_ids()).detach().requires_grad_()
    model(inputs_embeds=x).logits.sum().backward()
    return x.grad


def _state(model: Any, folder: Path) -> Any:
    return list(model.state_dict().items())


def _saved_state(model: Any, folder: Path) -> Any:
    torch.save(model.state_dict(), folder / "state.pt")
    return list(torch.load(folder / "state.pt").items())


def _saved_whole(model: Any, folder: Path) -> Any:
    torch.save(model, folder / "model.pt")
    return list(torch.load(folder / "model.pt", weights_only=False).state_dict().items())


def _pickled(model: Any, folder: Path) -> Any:
    return list(pickle.load(io.BytesIO(pickle.dumps(model))).state_dict().items())


def _counted(model: Any, folder: Path) -> Any:
    return sum(p.numel() for p in model.parameters()), [n for n, _ in model.named_parameters()]


def _replaced_weight(model: Any, folder: Path) -> Any:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    return logits(model, full_batch())


def _clipped(model: Any, folder: Path) -> Any:
    model(input_ids=_ids(), labels=_ids()).loss.backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# what a script does after it generated -> what the note says it asked for
ASKED: dict[Callable[[Any, Path], Any], str] = {
    _trains_in_eval_mode: "a gradient",
    _optimizer_first: "its parameters",
    _optimizer_of_named_groups: "its parameters",
    _gradient_of_the_input: "a gradient",
    _state: "state_dict",
    _saved_state: "state_dict",
    _saved_whole: "a pickle of it",
    _pickled: "a pickle of it",
    _counted: "its parameters",
    _replaced_weight: "another weight",
    _clipped: "a gradient",
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.each_value
@recipes
@pytest.mark.parametrize("script", ASKED, ids=lambda one: one.__name__.strip("_"))
def test_a_script_does_what_it_does_without_the_patch(script: Any, recipe: str, tmp_path: Path) -> None:
    if script is _replaced_weight and recipe == "exact":
        pytest.skip("nothing is packed")
    due = script(plain("llama", tie_word_embeddings=False), tmp_path)
    model, said = plain("llama", tie_word_embeddings=False), []
    with accelpatch.patch_on_first_use(recipe, verify=False, on_left=lambda one, why: said.append(why)):
        model.generate(_ids(), max_new_tokens=2, do_sample=False)
        assert replacements(model)
        found = script(model, tmp_path)
    assert said == [f"unpatched, since the script asked for {ASKED[script]}"]
    assert replacements(model) == []
    assert same(found, due)


@recipes
def test_looking_leaves_the_patch(recipe: str) -> None:
    model, said = plain("llama"), []
    with accelpatch.patch_on_first_use(recipe, verify=False, on_left=lambda one, why: said.append(why)):
        model.generate(_ids(), max_new_tokens=2, do_sample=False)
        assert next(model.parameters()).device == model.device
        assert next(iter(model.named_parameters()))[0]
        assert model.dtype == torch.float32
        model.eval().to("cpu")
        copy.deepcopy(model)
        assert model(input_ids=_ids()).logits.shape[-1] == 160
        assert model.get_input_embeddings().weight.shape[0] == 160
    assert said == []
    assert replacements(model)


def test_a_part_that_was_called_first() -> None:
    """`model.model` was patched on its own; the whole model takes its place."""
    model = plain("llama")
    with accelpatch.patch_on_first_use("int8", verify=False, on_left=lambda one, why: pytest.fail(why)):
        model.model(_ids())
        assert hasattr(model.model, "accelpatch")
        assert not hasattr(model, "accelpatch")
        model(_ids())
        assert "accelpatch" in vars(model)
        assert "accelpatch" not in vars(model.model)
    accelpatch.unpatch(model)
    assert replacements(model) == []
