"""Multimodal models: their language model by fast steps behind stock generate(), as transformers' own loop."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast, pipeline

import accelpatch
from accelpatch.fusion.cache_name import CACHE
from accelpatch.models.multimodal import MEDIA, PLACES
from accelpatch.runtime.cache_contents import storing
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.cpu.native_step import NATIVE
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.calls import CALL
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.multimodal_parts import FORWARD
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.multimodal import BY_MODULES, MODELS, PICTURE, qwen_inputs

LONG, STEPS = 32, 8
CALLS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
    "sampled-on-the-host": {"do_sample": True, "repetition_penalty": 1.3},
    "hidden-states": {"return_dict_in_generate": True, "output_hidden_states": True},
}
LOGITS: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
SOME = ("llava", "gemma3", "qwen2.5-vl", "qwen2-audio")


def pair(name: str, recipe: Any = "exact", made: Any = None) -> tuple[Any, Any]:
    """(a model that runs transformers' own loop over the same replaced modules, the patched one).

    made: the model to patch, in place of a new one of this name.
    """
    model = accelpatch.patch(MODELS[name][0]() if made is None else made, recipe, verify=False, progress=False)
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = vars(plain)[CODE].runtime = None  # of the model, and of the models inside it
    return plain, model


def steps(model: Any) -> int:
    """Steps that a model ran by fast paths so far."""
    paths = model.accelpatch.report().paths
    return int(paths.get(NATIVE, 0) + paths.get(CAPTURED, 0))


def greedy(new: int = STEPS) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}


def both(plain: Any, model: Any, given: Mapping[str, Any], **options: Any) -> tuple[Any, Any]:
    """What both generate from equal arguments; the tokens are the same."""
    found = []
    for one in (plain, model):
        torch.manual_seed(0)
        found.append(one.generate(**copy.deepcopy(dict(given)), **greedy() | options))
    assert torch.equal(*(getattr(one, "sequences", one) for one in found))
    return found[0], found[1]


def continued(made: Any, more: Tensor, **media: Any) -> dict[str, Any]:
    """The arguments of a next turn over the cache of the one before."""
    ids = torch.cat([made.sequences, more], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: getattr(made, CACHE), **media}


@pytest.mark.parametrize("name", MODELS)
def test_two_turns(name: str, machine: str) -> None:
    """A picture or sound and text, then text over the same cache; every new token but the first is a fast step."""
    plain, model = pair(name)
    made = both(plain, model, MODELS[name][1](2), return_dict_in_generate=True, **greedy(LONG))
    without = machine == "cpu" and name in {"aya-vision", *BY_MODULES}  # the native step has no LayerNorm
    fast = 0 if without else LONG - 1
    assert steps(model) == fast
    turns = [
        one.generate(**continued(before, torch.full((2, 3), 7)), **greedy(LONG))
        for one, before in zip((plain, model), made, strict=True)
    ]
    assert torch.equal(*turns)
    assert steps(model) == 2 * fast


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("call", CALLS)
def test_ways_to_generate(name: str, call: str, machine: str) -> None:
    plain, model = pair(name)
    both(plain, model, MODELS[name][1](2), **CALLS[call])
    assert steps(model) == STEPS - 1 or call == "hidden-states" or (call, machine) == ("beams", "as a gpu")


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2.5-vl", "idefics3"])
def test_a_batch_in_which_one_row_has_a_picture(name: str, machine: str) -> None:
    """The other row is text, padded at its left."""
    plain, model = pair(name)
    given, rows = MODELS[name][1](1), dict[str, Any]()
    ids = given["input_ids"]
    text = torch.cat([torch.zeros(1, ids.shape[1] - 4).long(), torch.tensor([[9, 8, 7, 6]])], dim=1)
    for key, value in given.items():
        rows[key] = value if key in MEDIA | PLACES else torch.cat([value, torch.zeros_like(value)])
    rows["input_ids"] = torch.cat([ids, text])
    rows["attention_mask"] = torch.cat([torch.ones_like(ids), text.ne(0).long()])
    if "mm_token_type_ids" in given:
        rows["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], torch.zeros_like(ids).int()])
    both(plain, model, rows)
    assert steps(model) == STEPS - 1


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2.5-vl", "qwen3-vl"])
def test_a_new_picture_in_the_second_turn(name: str, machine: str) -> None:
    plain, model = pair(name)
    given = MODELS[name][1](1)
    made = both(plain, model, given, return_dict_in_generate=True)
    turns = []
    for one, before in zip((plain, model), made, strict=True):
        media = {key: value for key, value in given.items() if key in MEDIA | PLACES}
        next_turn = continued(before, given["input_ids"], **media)
        for key in {"mm_token_type_ids", "token_type_ids"} & given.keys():  # of the new tokens alone
            old = torch.zeros_like(before.sequences).to(given[key].dtype)
            next_turn[key] = torch.cat([old, given[key]], dim=1)
        turns.append(one.generate(**next_turn, **greedy()))
    assert torch.equal(*turns)
    assert steps(model) == 2 * (STEPS - 1)


@pytest.mark.parametrize("name", SOME)
def test_embeddings_or_positions_of_the_caller(name: str, machine: str) -> None:
    plain, model = pair(name)
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    places = torch.arange(3, 12).expand(2, -1)
    both(plain, model, {"input_ids": ids, "attention_mask": mask, "position_ids": places})
    if "vl" in name:
        apart = torch.stack([places, places + 1, places, places])  # time differs from height and width
        apart[..., -1] = 11
        both(plain, model, {"input_ids": ids, "attention_mask": mask, "position_ids": apart})
        before = steps(model)
        apart[1, :, -1] = 12
        both(plain, model, {"input_ids": ids, "attention_mask": mask, "position_ids": apart})
        assert steps(model) == before, "one token's axes differ, and so do those of all behind it"
    if name in ("gemma3", "qwen2-audio"):
        return  # their generate() takes no embeddings, Qwen2-Audio's in older versions
    before = steps(model)
    embeds = plain.get_input_embeddings()(ids).detach()
    both(plain, model, {"inputs_embeds": embeds, "attention_mask": mask})
    assert steps(model) == before + STEPS - 1


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen2-audio"])
def test_a_loop_of_ones_own(name: str, machine: str) -> None:
    """model(ids, cache) with positions or without, after a cache was cropped too."""
    plain, model = pair(name)
    given, found = MODELS[name][1](1), []
    for one in (plain, model):
        with torch.no_grad():
            made = one(**copy.deepcopy(given), use_cache=True)
            assert type(made) is type(plain(**copy.deepcopy(given)))
            cache, logits = getattr(made, CACHE), [made.logits[:, -1]]
            for token in (7, 8, 9):
                made = one(torch.tensor([[token]]), **{CACHE: cache})
                logits.append(made.logits[:, -1])
            cache.crop(-2)
            place = torch.full((1, 1), cache.get_seq_length())
            place = place.expand(3, 1, 1) if "vl" in name else place
            for token in (8, 9, 10):
                made = one(torch.tensor([[token]]), position_ids=place, **{CACHE: cache})
                logits.append(made.logits[:, -1])
                place = place + 1
        found.append(torch.cat(logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert steps(model) >= 3 or machine != "cpu"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("machine", ["as a gpu"], indirect=True)
def test_prompts(name: str, machine: str) -> None:
    """Logits of every token of a padded batch, and what is cached: the language model's layers are fused."""
    plain, model = pair(name)
    given = MODELS[name][1](2)
    given["attention_mask"][1, :2] = 0
    calls: dict[str, dict[str, Any]] = {"a call": {}, "by generate()": {"max_new_tokens": 1, **LOGITS}}
    for how, options in calls.items():
        found = []
        for one in (plain, model):
            with torch.no_grad():
                copied = copy.deepcopy(given)
                made = one.generate(**copied, **options) if options else one(**copied, use_cache=True)
            logits = torch.stack(made.logits) if options else made.logits[given["attention_mask"].bool()]
            held = [tensor for layer in storing(getattr(made, CACHE)) for tensor in (layer.keys, layer.values)]
            found.append([logits, *(tensor[:, :, -4:] for tensor in held)])
        for mine, due in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(mine, due, rtol=1e-4, atol=1e-5, msg=lambda text, how=how: f"{how}: {text}")
        assert model.accelpatch.report().paths[FORWARD] == (0 if name in BY_MODULES else 1 + bool(options))


def test_a_tower_that_comes_again_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    plain, model = pair("llava")
    given = MODELS["llava"][1](1)
    for seed in range(5):
        given["pixel_values"] = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        both(plain, model, given)
    assert model.accelpatch.report().paths[CALL] >= 1


def test_tokens_of_pictures_without_pictures(machine: str) -> None:
    """Ids beyond the table of embeddings, which Gemma's own forward replaces where no picture comes with them."""
    plain, model = pair("gemma3")
    for one in (plain, model):
        for config in (one.config, one.model.config):
            config.image_token_id = config.image_token_index = 125
    ids = torch.tensor([[5, 6, 125, 7, 8]])
    both(plain, model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_what_a_step_cannot_know(machine: str) -> None:
    """A step without positions after a picture, whose axes end at another place than its tokens."""
    plain, model = pair("qwen2.5-vl")
    given, found = qwen_inputs(1), []
    for one in (plain, model):
        with torch.no_grad():
            cache = getattr(one(**copy.deepcopy(given), use_cache=True), CACHE)
            found.append(one(torch.tensor([[7]]), **{CACHE: cache}).logits)
    torch.testing.assert_close(*found)
    assert steps(model) == 0


def test_plans_name_the_layers_of_text() -> None:
    plan = accelpatch.plan(MODELS["qwen3-vl"][0](), "exact")
    (layer,) = (entry for entry in plan.entries if entry.site.path == "model.language_model.layers.0")
    assert layer.choice is not None
    assert layer.choice.kernel == "native step"
    said = str(plan)
    assert "language model: model.language_model, in every step" in said
    assert re.search(r"^vision: model.visual \(.*\), in prompts alone$", said, re.MULTILINE)


@pytest.mark.parametrize("part, name", [("vision", "llava"), ("vision", "qwen2.5-vl"), ("audio", "qwen2-audio")])
def test_a_rule_for_a_tower(part: str, name: str) -> None:
    rules = [{"match": {"role": part}, "replace": "keep"}, {"match": {"role": "linear"}, "replace": "int8_weight_only"}]
    model = accelpatch.patch(MODELS[name][0](), {"rules": rules, "verify": {"bound": 0.05}}, progress=False)
    replaced = [site.path for site in model.accelpatch.report().sites if site.replacer]
    assert replaced
    assert all(path.startswith("model.language_model.") for path in replaced)


def test_the_pipeline_of_pictures(machine: str) -> None:
    """A picture that is drawn here, through processor and pipeline."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": PICTURE, "<unk>": 3, "what": 7, "is": 8, "this": 9}
    tokenizer = Tokenizer(WordLevel(words | {f"w{n}": n for n in range(10, 110)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<image>"], extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = LlavaProcessor(
        CLIPImageProcessor(**sizes), fast, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    picture = Image.new("RGB", (24, 20), "white")
    ImageDraw.Draw(picture).ellipse((4, 4, 18, 16), fill="red")
    plain, model = pair("llava")
    said = [
        pipeline("image-text-to-text", model=one, processor=processor)(
            images=picture, text="<image> what is this", generate_kwargs=greedy()
        )[0]["generated_text"]
        for one in (plain, model)
    ]
    assert said[0] == said[1]
    assert steps(model) == STEPS - 1
