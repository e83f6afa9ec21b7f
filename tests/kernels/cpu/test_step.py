"""The native decode step against the model in float64: every Llama-like family, padding, threads, neighbours, fork."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries as builder
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.decode_step import DecodeStep
from tests.support.stepping import FORMATS, build, rounded

reason = builder.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
STEPS, LENGTH = 72, 80
BASE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-odd-sizes": (LlamaConfig, LlamaForCausalLM, {"hidden_size": 60, "intermediate_size": 70, "head_dim": 22}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2-bias": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3-qk-norm": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, GEMMA),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA),
}


def tiny(family: str) -> PreTrainedModel:
    config, model, extra = FAMILIES[family]
    torch.manual_seed(3)
    made = model(config(**{**BASE, **extra})).eval()
    for name, parameter in made.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "bias" in name or family.startswith("gemma"):
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made


def column(*values: int) -> Tensor:
    return torch.tensor(values)


def decode(step: DecodeStep, ids: Tensor, pads: Tensor) -> Tensor:
    """logits [B, T, V] of the step, a token at a time; those at padding mean nothing."""
    logits = []
    for t in range(ids.shape[1]):
        slots = torch.full((ids.shape[0],), t)
        logits.append(step(ids[:, t], slots, torch.minimum(pads, slots), (slots - pads).clamp_min(0)))
    return torch.stack(logits, dim=1)


def expected(model: PreTrainedModel, step: DecodeStep, ids: Tensor, pads: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Each sequence's logits by the model with the step's weights, without its padding: no mask can hide a fault."""
    stands_for = rounded(copy.deepcopy(model), step, dtype)
    with torch.no_grad():
        return [stands_for(row[pad:][None]).logits[0] for row, pad in zip(ids, pads.tolist(), strict=True)]


def worst(found: Tensor | list[Tensor], due: list[Tensor], pads: Tensor) -> float:
    parts = [row[-len(part) :].double() - part for row, part in zip(found, due, strict=True)]
    return max(float(part.abs().max()) for part in parts)


@pytest.fixture(params=native_library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param not in native_library.isas():
        pytest.skip(f"this machine has no {request.param}")
    native_library.use_isa(request.param)
    yield
    native_library.use_isa(None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.each_value
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float_rule_over_72_padded_steps(isa: None, family: str, format_: str) -> None:
    if format_ == "int4" and family == "llama-odd-sizes":
        pytest.skip("its widths are not multiples of int4's group of 32")
    model, pads = tiny(family), column(0, 5, 17)
    step = build(model, FORMATS[format_], 4, LENGTH)
    ids = torch.randint(1, 131, (3, STEPS), generator=torch.Generator().manual_seed(1))
    found = decode(step, ids, pads)
    exact = expected(model, step, ids, pads, torch.float64)
    plain = expected(model, step, ids, pads, torch.float32)
    largest = max(float(part.abs().max()) for part in exact)
    assert worst(found, exact, pads) <= 2 * worst(plain, exact, pads) + largest * torch.finfo(torch.float32).eps


def small_step(format_: str = "int8") -> DecodeStep:
    return build(tiny("llama"), FORMATS[format_], 8, LENGTH)


def tokens(batch: int) -> Tensor:
    return torch.randint(1, 131, (batch, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("format_", FORMATS)
def test_threads_change_no_bit(isa: None, format_: str, threads: None) -> None:
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(decode(small_step(format_), tokens(8), torch.zeros(8, dtype=torch.int64)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("format_", FORMATS)
def test_neighbours_and_padding_change_no_bit(isa: None, format_: str) -> None:
    ids, pads = tokens(8), column(0, 1, 2, 3, 4, 5, 6, 7)
    whole = decode(small_step(format_), ids, pads)
    for b in range(8):
        alone = decode(small_step(format_), ids[b : b + 1, b:], column(0))
        assert torch.equal(alone[0], whole[b, b:])


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_several_tokens_of_one_sequence_have_the_bits_of_one_after_the_other(family: str, format_: str) -> None:
    one = build(tiny(family), FORMATS[format_], max_batch=1, length=LENGTH)
    several = replace_caches(one, tokens=8)
    ids = torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(4))
    due = torch.cat([one(ids[at : at + 1], *(torch.tensor([n]) for n in (at, 0, at))) for at in range(70)])
    found, at = [], 0
    for count in (1, 8, 2, 3, 5, 7, 8, 6, 4, 8, 8, 8, 2):
        places = torch.arange(at, at + count)
        several(ids[at : at + count].flip(0), places, torch.zeros_like(places), places)
        found.append(several(ids[at : at + count], places, torch.zeros_like(places), places))  # again: nothing changes
        at += count
    assert torch.equal(torch.cat(found), due)
    for mine, its in zip((*several.keys, *several.values), (*one.keys, *one.values), strict=True):
        assert torch.equal(mine[:, :, :70], its[:, :, :70])
    with pytest.raises(KernelError, match="at most 8"):
        several(ids[:9], *[torch.arange(9)] * 3)
    two = build(tiny(family), FORMATS[format_], max_batch=2, length=LENGTH)
    with pytest.raises(KernelError, match="of one sequence"):
        replace_caches(two, tokens=8)


def replace_caches(step: DecodeStep, tokens: int) -> DecodeStep:
    """A step of several tokens of one sequence over caches of its own."""
    keys, values = ([torch.full_like(one, float("nan")) for one in held] for held in (step.keys, step.values))
    return DecodeStep(step.shape, step.layers, step.embedding, step.head, step.final_norm, keys, values, tokens)


def test_only_the_slots_that_were_asked_for_are_written() -> None:
    ids, one, other = tokens(1), small_step(), small_step()
    due = decode(one, ids, column(0))[:, -1]
    for t in range(8):
        other(ids[:, t], column(t), column(0), column(t))
    assert torch.equal(other(ids[:, 8], column(8), column(0), column(8)), due)
    assert torch.equal(one.keys[:, :1, :, :9], other.keys[:, :1, :, :9])
    assert one.keys[:, 1:].isnan().all(), "another sequence's cache was written"
    assert one.keys[:, 0, :, 9:].isnan().all(), "a slot that was not asked for was written"


def test_two_models_in_two_threads(threads: None) -> None:
    torch.set_num_threads(2)
    steps = [small_step("int8"), small_step("int4")]
    due = [decode(step, tokens(2), column(0, 0)) for step in steps]
    wrong: list[int] = []

    def stream(i: int) -> None:
        wrong.extend(i for _ in range(20) if not torch.equal(decode(steps[i], tokens(2), column(0, 0)), due[i]))

    callers = [threading.Thread(target=stream, args=(i,)) for i in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
        assert not caller.is_alive()
    assert wrong == []


def test_one_model_in_two_threads(threads: None) -> None:
    torch.set_num_threads(2)
    step, done = small_step(), []
    callers = [threading.Thread(target=lambda: done.append(decode(step, tokens(2), column(0, 0)))) for _ in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
        assert not caller.is_alive()
    # both write the same keys into the same slots, so each sees what it would have seen alone
    assert torch.equal(done[0], done[1])


def test_fork_after_a_step(threads: None) -> None:
    torch.set_num_threads(2)
    step = small_step()
    due = decode(step, tokens(2), column(0, 0))
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(decode(step, tokens(2), column(0, 0)), due) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(decode(step, tokens(2), column(0, 0)), due)


@pytest.mark.parametrize(
    "slot, start, position",
    [(LENGTH, 0, 0), (-1, 0, 0), (3, 4, 0), (0, -1, 0), (0, 0, -1)],
    ids=["slot-too-large", "slot-negative", "start-after-slot", "start-negative", "position"],
)
def test_what_is_out_of_range_is_refused(slot: int, start: int, position: int) -> None:
    step = small_step()
    with pytest.raises(KernelError):
        step(column(1), column(slot), column(start), column(position))
    assert step.keys[0].isnan().all()


@pytest.mark.parametrize("token", [131, -1, 10**9], ids=["one-too-many", "negative", "far-too-many"])
def test_a_token_without_a_row_is_an_index_error_as_of_an_embedding(token: int) -> None:
    step = small_step()
    with pytest.raises(IndexError, match=rf"\[{token}\], and the embedding has 131 rows"):
        step(column(token), column(0), column(0), column(0))
    assert step.keys[0].isnan().all()


def test_too_many_sequences_are_refused() -> None:
    with pytest.raises(KernelError, match="1 to 8 sequences"):
        build(tiny("llama"), FORMATS["int8"], 9, LENGTH)
    step = build(tiny("llama"), FORMATS["int8"], 1, LENGTH)
    with pytest.raises(KernelError, match="at most 1"):
        step(column(1, 1), column(0, 0), column(0, 0), column(0, 0))


def test_wrong_shapes_are_refused() -> None:
    step = small_step()
    with pytest.raises(KernelError, match="int64"):
        step(column(1).int(), column(0), column(0), column(0))
    with pytest.raises(KernelError, match="logits"):
        step(column(1), column(0), column(0), column(0), torch.empty(1, 130))


MISFITS: dict[str, tuple[tuple[str, int], str]] = {
    "q": (("q", 40), r"40 rows of q and 32 of k are no heads of 16|o is 64 x 64, and 64 x 40 belongs"),
    "k": (("k", 48), r"v is 32 x 64, and 48 x 64 belongs"),
    "o": (("o", 48), r"o is 48 x 64, and 64 x 64 belongs"),
    "up": (("up", 96), r"up is 96 x 64, and 160 x 64 belongs"),
    "down": (("down", 32), r"down is 32 x 160, and 64 x 160 belongs"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_layer_whose_weights_do_not_fit_together_is_named(case: str) -> None:
    ((name, rows), match), step = MISFITS[case], small_step()
    layer = step.layers[1]
    assert layer is not None
    cut = FORMATS["int8"](torch.randn(rows, layer.linears[name].k), None)
    layers = [step.layers[0], replace(layer, linears=layer.linears | {name: cut})]
    with pytest.raises(KernelError, match=rf"layer 1 is none of a native step: .*({match})"):
        DecodeStep(step.shape, layers, step.embedding, step.head, step.final_norm, step.keys, step.values)
