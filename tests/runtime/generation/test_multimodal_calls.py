"""Calls of multimodal models, or of the language model in them, that ask for more than logits after a text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.generation.speculation import ACCEPTED
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs import runtime as runtime_module
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.multimodal_parts import FORWARD
from tests.runtime.generation.test_multimodal import LOGITS, STEPS, both, continued, greedy, pair, steps
from tests.support.multimodal import BEGIN, END, MODELS, PICTURE, VIDEO, audio_inputs, qwen_inputs

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


def test_the_language_model_alone_in_training_mode() -> None:
    """Its dropout acts, as that of the whole model would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
        _, model = pair("llava")
        model.get_decoder().layers[0].self_attn.attention_dropout = 0.9
        model.get_decoder().train()
        with torch.no_grad():
            assert not torch.equal(model(IDS).logits, model(IDS).logits)
            assert not torch.equal(with_picture(model).logits, with_picture(model).logits)


def test_a_prompt_with_one_layer_as_modules_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    _, model = pair("llava")
    vars(model)[RUNTIME].unfuse({1: "a reason"})
    model.generate(**MODELS["llava"][1](1), **greedy())
    paths = model.accelpatch.report().paths
    assert paths[f"{FORWARD}, but modules in layers [1]: a reason"] == 1
    assert not [path for path in paths if path.startswith("prefill by modules")]


@pytest.mark.parametrize("indexes", [[0, 1, 2], []])
def test_outputs_of_towers_behind_the_first_layers(indexes: list[int], machine: str) -> None:
    """Qwen3-VL with a further output of the tower for each layer of the language model, and with none."""
    config = MODELS["qwen3-vl"][0]().config
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 3, indexes
    torch.manual_seed(0)
    plain, model = pair("qwen3-vl", made=transformers.Qwen3VLForConditionalGeneration(config).eval())
    due, made = both(plain, model, qwen_inputs(2), **LOGITS)
    torch.testing.assert_close(made.logits, due.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_videos(name: str, machine: str) -> None:
    """A video of two frames a row, then text over the same cache."""
    plain, model = pair(name)
    ids = qwen_inputs(2)["input_ids"]
    shown = [BEGIN, *[VIDEO] * 8, END] if name == "qwen2-vl" else [BEGIN, *[VIDEO] * 4, END] * 2  # one mark a frame
    ids = torch.cat([ids[:, :3], torch.tensor(shown).expand(2, -1), ids[:, -3:]], dim=1)
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": torch.randn(2 * 2 * 16, 96, generator=torch.Generator().manual_seed(3)),
        "video_grid_thw": torch.tensor([[2, 4, 4]] * 2),
        "mm_token_type_ids": (ids == VIDEO).int() * 2,
    }
    made = both(plain, model, given, return_dict_in_generate=True)
    assert steps(model) == STEPS - 1
    turns = [one.generate(**continued(before, IDS[:, :3].expand(2, -1)), **greedy()) for one, before in
             zip((plain, model), made, strict=True)]  # fmt: skip
    assert torch.equal(*turns)


@pytest.mark.parametrize("places", [4, 16])
def test_pictures_longer_than_the_window(places: int, machine: str) -> None:
    """Tokens of a picture see each other beyond the window of Gemma 3's layers, in a padded batch too."""
    config = MODELS["gemma3"][0]().config
    config.text_config.sliding_window, config.mm_tokens_per_image = 3, places
    torch.manual_seed(0)
    plain, model = pair("gemma3", made=transformers.Gemma3ForConditionalGeneration(config).eval())
    ids = torch.cat([IDS, torch.full((1, places), PICTURE), IDS], dim=1).expand(2, -1)
    given = MODELS["gemma3"][1](2) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given |= {"token_type_ids": (ids == PICTURE).long()}
    given["attention_mask"][1, :2] = 0
    due, made = both(plain, model, given, **LOGITS)
    torch.testing.assert_close(made.logits, due.logits, rtol=1e-4, atol=1e-5)
    assert steps(model) == STEPS - 1


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_prompt_lookup_behind_a_picture(name: str, machine: str) -> None:
    """Draft tokens from the prompt's text; embeddings in place of ids have none to look up."""
    plain, model = pair(name, {"extends": "exact", "name": "drafts", "runtime": {"speculate": "prompt_lookup"}})
    both(plain, model, MODELS[name][1](1), **greedy(40))
    embeds = plain.get_input_embeddings()(IDS).detach()
    both(plain, model, {"inputs_embeds": embeds}, **greedy(40))
    assert machine == "cpu" or model.accelpatch.report().paths[ACCEPTED]


class Negated(transformers.LlavaModel):
    """A model around the language model that does more than transformers' own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = super().forward(*args, **kwargs)
        made.last_hidden_state = -made.last_hidden_state
        return made


def test_other_code_around_the_language_model(machine: str) -> None:
    def made() -> Any:
        model = MODELS["llava"][0]()
        model.model.__class__ = Negated
        return model

    plain, model = made(), accelpatch.patch(made(), "exact", verify=False, progress=False)
    both(plain, model, MODELS["llava"][1](1))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-5)


def test_one_token_for_a_whole_sound(machine: str) -> None:
    """Older versions of transformers expand it in the prompt, which then is longer than its ids."""
    plain, model = pair("qwen2-audio")
    try:
        both(plain, model, audio_inputs(1, 1, True))
    except TypeError:  # of transformers' own loop, which expands it no more
        with pytest.raises(TypeError):
            model.generate(**audio_inputs(1, 1, True), **greedy())
