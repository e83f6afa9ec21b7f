"""Calls of multimodal models, or of the language model in them, that ask for more than logits after a text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import runtime as runtime_module
from accelpatch.runtime.graphs.multimodal_parts import FORWARD
from tests.runtime.generation.test_multimodal import pair, steps
from tests.support.multimodal import MODELS

IDS = torch.arange(5, 13)[None]
TWO_TEXTS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])


def decoder_call(model: Any, **more: Any) -> Any:
    """What the language model makes of embeddings of the caller."""
    return model.get_decoder()(inputs_embeds=model.get_input_embeddings()(IDS), **more)


def by_configuration(model: Any, name: str, value: Any, call: Callable[[Any], Any]) -> Any:
    """What a call returns while the language model's configuration says so."""
    config = model.get_decoder().config
    before = getattr(config, name)
    setattr(config, name, value)
    try:
        return call(model)
    finally:
        setattr(config, name, before)


def with_picture(model: Any) -> Any:
    return model(**MODELS["llava"][1](1))


def text(model: Any, **more: Any) -> Any:
    return model(IDS, **more)


def step(model: Any) -> Any:
    """A step behind a text."""
    cache = getattr(model(IDS, use_cache=True), CACHE)
    return model(IDS[:, :1], position_ids=torch.tensor([[8]]), **{CACHE: cache})


HIDDEN = "output_hidden_states"
CALLS: dict[str, Callable[[Any], Any]] = {
    "a tuple of the language model": lambda model: decoder_call(model, return_dict=False),
    "no causal mask": lambda model: decoder_call(model, is_causal=False),
    "two texts in a row": lambda model: model(IDS, position_ids=TWO_TEXTS, use_cache=False),
    "two texts in a row, as embeddings": lambda model: decoder_call(model, position_ids=TWO_TEXTS, use_cache=False),
    "hidden states of a prompt with a picture": lambda model: by_configuration(model, HIDDEN, True, with_picture),
    "hidden states of a text": lambda model: by_configuration(model, HIDDEN, True, text),
    "hidden states of a step": lambda model: by_configuration(model, HIDDEN, True, step),
    "hidden states of some layers": lambda model: text(model, output_hidden_states=[0, 2]),
    "no cache of a text": lambda model: by_configuration(model, "use_cache", False, text),
}


def tensors(made: Any) -> list[Tensor]:
    """All tensors in outputs but those of a cache."""
    if isinstance(made, Tensor):
        return [made]
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, tuple) else ()
    return [one for part in parts for one in tensors(part)]


@pytest.mark.parametrize("call", CALLS)
def test_what_the_modules_return(call: str, machine: str) -> None:
    plain, model = pair("llava")
    with torch.no_grad():
        due, made = CALLS[call](plain), CALLS[call](model)
    assert type(made) is type(due)
    assert getattr(made, "keys", list)() == getattr(due, "keys", list)()
    for one, other in zip(tensors(made), tensors(due), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert FORWARD not in model.accelpatch.report().paths or call == "no cache of a text"  # of the language model


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_steps_return_every_field(name: str, machine: str) -> None:
    """Older versions of transformers return by how much the pictures moved positions."""
    plain, model = pair(name)
    made = []
    for one in (plain, model):
        with torch.no_grad():
            cache = getattr(one(**MODELS[name][1](1), use_cache=True), CACHE)
            made.append(one(IDS[:, :1], position_ids=torch.full((3, 1, 1), 20), **{CACHE: cache}))
    assert made[0].keys() == made[1].keys()
    assert steps(model) == 1


def test_another_thread_leaves_the_state_of_a_prompt_alone(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of the runtime are those of the thread that generates: others run the modules meanwhile."""
    if machine == "cpu":
        pytest.skip("native steps have no such state")
    _, model = pair("llava")
    runtime, reached = vars(model)[RUNTIME], []
    monkeypatch.setattr(runtime_module, "part_outputs", lambda *given: reached.append(given))

    def call() -> None:
        with torch.no_grad():
            decoder_call(model)

    with runtime.alone(), runtime.prompting():
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert not reached
        call()
    assert reached
