"""Native steps of encoder-decoders on a CPU: stock generate()'s tokens, and proof that they ran."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.utils import GenerateEncoderDecoderOutput

import accelpatch
from accelpatch.fusion import verified_laid_out
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.verified_cross import cross_layers
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.models.encoder_decoders import ENDS
from accelpatch.runtime.cpu import native_cache
from accelpatch.runtime.cpu.native_step import NATIVE
from tests.fusion.test_cross_layers import FUSED, LAYERS, NEW, model_of, patched
from tests.support.encoder_decoders import encoder_decoder, given_to, sounds, texts

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}


def steps_of(model: Any) -> int:
    """Native steps so far."""
    return int(model.accelpatch.report().paths[NATIVE])


def by_modules(model: Any) -> Any:
    """A model whose layers run their modules."""
    twin = copy.deepcopy(model)
    for layer in cross_layers(twin).values():
        layer.run_modules()
    return twin


def logits_of(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    """[steps, B, V] of a greedy text."""
    made = model.generate(**given, **GREEDY | options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(made.logits)


def test_every_model_of_the_table_is_here() -> None:
    here = {type(encoder_decoder(name)).__name__ for name in FUSED}
    assert ENDS.keys() - here == {"PLBartForConditionalGeneration"}  # a copy of BART


@pytest.mark.parametrize("name", FUSED)
def test_tokens_of_every_family(name: str) -> None:
    model, given = model_of(name), given_to(name)
    ways: list[dict[str, Any]] = [{}, {"num_beams": 2}]
    due = [model.generate(**given, **GREEDY | {"max_new_tokens": NEW}, **way) for way in ways]
    patched(model)
    for way, tokens in zip(ways, due, strict=True):
        before = steps_of(model)
        assert torch.equal(model.generate(**given, **GREEDY | {"max_new_tokens": NEW}, **way), tokens)
        assert steps_of(model) == before + NEW - 1


@pytest.mark.parametrize("name, recipe", [("flan-t5", "int8"), ("bart", "smoothquant"), ("whisper", "int8")])
def test_quantised_steps_are_as_modules(name: str, recipe: str) -> None:
    model, given = patched(model_of(name), recipe), given_to(name)
    made, due = logits_of(model, given), logits_of(by_modules(model), given)
    assert steps_of(model) == 7
    assert (made - due).norm() <= 1e-3 * due.norm()


@pytest.mark.parametrize("path", native_library.isas())
def test_logits_are_as_modules_on_every_path(path: str) -> None:
    for name in ("t5", "bart"):
        model = patched(model_of(name))
        if name == "bart":
            model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(4))
        native_library.use_isa(path)
        try:
            made = logits_of(model, given_to(name))
        finally:
            native_library.use_isa(None)
        due = logits_of(by_modules(model), given_to(name))
        assert steps_of(model) == 7
        torch.testing.assert_close(made, due, rtol=1e-4, atol=1e-4)


def test_encoders_of_other_lengths_masks_and_begun_texts() -> None:
    for name in ("m2m100", "t5"):
        model = model_of(name)
        cases: list[dict[str, Any]] = [texts(length) for length in (40, 9, 150, 9)]
        cases.append({**texts(), "attention_mask": texts()["attention_mask"].flip(0, 1)})
        begun = torch.tensor([[3, 9, 12], [3, 11, 7], [3, 8, 8]])
        cases.append({**texts(), "decoder_input_ids": begun})
        with torch.no_grad():
            states = model.get_encoder()(**texts(20))
        cases.append({"encoder_outputs": states, "attention_mask": texts(20)["attention_mask"]})
        cases.append({"encoder_outputs": type(states)(last_hidden_state=-states[0])})
        due = [model.generate(**copy.deepcopy(case), **GREEDY) for case in cases]
        patched(model)
        made = [model.generate(**copy.deepcopy(case), **GREEDY) for case in cases]
        assert all(torch.equal(*both) for both in zip(made, due, strict=True))
        assert steps_of(model) == 7 * len(cases)
        holes = {**texts(), "decoder_input_ids": begun, "decoder_attention_mask": begun.ne(11).long()}
        made = [one.generate(**copy.deepcopy(holes), **GREEDY) for one in (model, by_modules(model))]
        assert torch.equal(*made)
        assert model.accelpatch.report().paths["modules: an attention mask that is not left padding"] == 7


def test_a_mask_that_hides_everything_is_as_stocks() -> None:
    model, given = model_of("t5"), texts()
    given["attention_mask"][1] = 0
    due = model.generate(**given, **GREEDY)
    assert torch.equal(patched(model).generate(**given, **GREEDY), due)


def test_a_cache_outgrows_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_cache, "ROOM", 4)
    for name in ("t5", "bart"):
        model, options = model_of(name), {"do_sample": False, "max_new_tokens": NEW, "num_beams": 2}
        due = [model.generate(**texts(), **options | {"num_beams": beams}) for beams in (1, 2)]
        patched(model)
        made = [model.generate(**texts(), **options | {"num_beams": beams}) for beams in (1, 2)]
        assert all(torch.equal(*both) for both in zip(made, due, strict=True))
        assert steps_of(model) == 2 * (NEW - 1)


def stepped(model: Any, change: Any) -> list[Tensor]:
    """Logits of four steps by calls of the model; `change(call, given)` alters its arguments before each."""
    given, made = texts(), list[Tensor]()
    with torch.no_grad():
        outputs = model.get_encoder()(**given)
        call = {"encoder_outputs": outputs, "attention_mask": given["attention_mask"], CACHE: None, "use_cache": True}
        for index in range(5):
            change(index, call)
            answer = model(decoder_input_ids=torch.full((3, 1), 5 + index), **call)
            call[CACHE] = getattr(answer, CACHE)
            made.append(answer.logits)
    return made[1:]


def hide_more(index: int, call: dict[str, Any]) -> None:
    call["attention_mask"][0, 8 - index :] = 0


def reorder(index: int, call: dict[str, Any]) -> None:
    if index == 2:
        call[CACHE].reorder_cache(torch.tensor([2, 0, 1]))


def write_keys(index: int, call: dict[str, Any]) -> None:
    if index:
        call[CACHE].cross_attention_cache.layers[1].keys.neg_()


def put_values(index: int, call: dict[str, Any]) -> None:
    if index == 2:
        layer = call[CACHE].cross_attention_cache.layers[0]
        layer.values = layer.values * 2


def other_cache(index: int, call: dict[str, Any]) -> None:
    if index == 2:
        call[CACHE] = copy.deepcopy(call[CACHE])
        call[CACHE].cross_attention_cache.layers[0].keys.mul_(0.5)


@pytest.mark.parametrize("change", [hide_more, reorder, write_keys, put_values, other_cache])
def test_what_a_caller_does_between_steps_is_seen(change: Any) -> None:
    model = model_of("t5")
    due = stepped(model, change)
    made = stepped(patched(model), change)
    torch.testing.assert_close(made, due, rtol=1e-4, atol=1e-4)
    assert steps_of(model) == 4


def test_what_generate_returns() -> None:
    model, options = model_of("bart"), GREEDY | {"return_dict_in_generate": True, "output_scores": True}
    due = model.generate(**texts(), **options)
    made = patched(model).generate(**texts(), **options)
    assert type(made) is GenerateEncoderDecoderOutput
    assert torch.equal(made.sequences, due.sequences)
    torch.testing.assert_close(made.scores, due.scores, rtol=1e-4, atol=1e-4)
    for name in ("self_attention_cache", "cross_attention_cache"):
        for one, other in zip(*(getattr(getattr(run, CACHE), name).layers for run in (made, due)), strict=True):
            torch.testing.assert_close((one.keys, one.values), (other.keys, other.values), rtol=1e-4, atol=1e-4)
    torch.manual_seed(1)
    sampled = model.generate(**texts(), **GREEDY | {"do_sample": True})
    torch.manual_seed(1)
    assert torch.equal(by_modules(model).generate(**texts(), **GREEDY | {"do_sample": True}), sampled)


def test_a_hook_inside_a_layer_runs_its_modules() -> None:
    model, seen = patched(model_of("bart")), list[int]()
    due = model.generate(**texts(), **GREEDY)
    handle = model.model.decoder.layers[0].fc1.register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(model.generate(**texts(), **GREEDY), due)
    assert (len(seen), steps_of(model)) == (8, 7)
    handle.remove()
    model.generate(**texts(), **GREEDY)
    assert steps_of(model) == 14


def bias_of_scores(model: Any) -> Tensor:
    weight: Tensor = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return weight


def positions(model: Any) -> Tensor:
    weight: Tensor = model.model.decoder.embed_positions.weight
    return weight


def logits_bias(model: Any) -> Tensor:
    bias: Tensor = model.final_logits_bias
    return bias


def value(model: Any) -> Tensor:
    weight: Tensor = model.model.decoder.layers[1].encoder_attn.out_proj.weight
    return weight


@pytest.mark.parametrize(
    "name, part", [("t5", bias_of_scores), ("bart", positions), ("bart", logits_bias), ("bart", value)]
)
def test_changed_weights_are_seen(name: str, part: Any) -> None:
    model = patched(model_of(name))
    before = logits_of(model, texts())
    with torch.no_grad():
        part(model).add_(torch.randn(part(model).shape, generator=torch.Generator().manual_seed(5)))
    made = logits_of(model, texts(), max_new_tokens=2)
    assert steps_of(model) == 8
    assert not torch.allclose(made[1], before[1], atol=1e-2)
    torch.testing.assert_close(made, logits_of(by_modules(model), texts(), max_new_tokens=2), rtol=1e-4, atol=1e-4)


def test_a_copy_has_steps_of_its_own() -> None:
    model = patched(model_of("whisper"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(**sounds(), **GREEDY), model.generate(**sounds(), **GREEDY))
    assert (steps_of(twin), steps_of(model)) == (7, 7)


def test_positions_without_an_embedding_are_stocks_matter() -> None:
    model = model_of("m2m100", max_position_embeddings=12)  # whose table grows
    due = model.generate(**texts(), **GREEDY | {"max_new_tokens": 20})
    table = model.model.decoder.embed_positions
    table.make_weights(14, table.embedding_dim, table.padding_idx)
    patched(model)
    assert torch.equal(model.generate(**texts(), **GREEDY | {"max_new_tokens": 20}), due)
    assert 0 < model.accelpatch.report().paths["modules: a position without an embedding"] < 19


@pytest.mark.parametrize(
    "name, rows, reason",
    [
        ("t5", 9, "a batch of more than 8"),
        ("umt5", 3, "what a UMT5ForConditionalGeneration computes around its layers is not known to the native step"),
    ],
)
def test_what_runs_by_modules(name: str, rows: int, reason: str) -> None:
    model, given = model_of(name), texts(rows=rows)
    due = model.generate(**given, **GREEDY)
    assert torch.equal(patched(model).generate(**given, **GREEDY), due)
    assert model.accelpatch.report().paths[f"modules: {reason}"] == 7


def test_a_native_step_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = DecodeStep.part

    def wrong(self: DecodeStep, *given: Any) -> Any:
        made = own(self, *given)
        given[-1].mul_(1.001)
        return made

    model = model_of("bart")
    due = model.generate(**texts(), **GREEDY)
    monkeypatch.setattr(DecodeStep, "part", wrong)
    monkeypatch.setattr(verified_laid_out, "first_of_kind", lambda layers: list(range(len(layers))))
    patched(model)
    assert f"0 of {LAYERS} layers fused" in str(model.accelpatch.report())
    assert torch.equal(model.generate(**texts(), **GREEDY), due)
    assert model.accelpatch.report().paths["modules: layer 0: it runs its modules"] == 7


def test_unpatched_it_is_as_it_was() -> None:
    model = model_of("marian")
    due, state = model.generate(**texts(), **GREEDY), {key: one.clone() for key, one in model.state_dict().items()}
    patched(model).generate(**texts(), **GREEDY)
    accelpatch.unpatch(model)
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    assert torch.equal(model.generate(**texts(), **GREEDY), due)
