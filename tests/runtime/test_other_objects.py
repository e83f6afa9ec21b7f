"""Code of others that is no plain function of a module: objects, decorators, lists of layers, samplers, inner calls."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
import transformers.models.mixtral.modeling_mixtral as mixtral
import transformers.models.qwen2.modeling_qwen2 as qwen2
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.logits_process import LogitsProcessorList, MinNewTokensLengthLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import accelpatch
from tests.support.other_code import assert_alike, last_logits, patched, scaled
from tests.support.tiny import CAUSAL, full_batch

Patch = Callable[[pytest.MonkeyPatch], None]


def as_object(function: Any) -> Any:
    """A callable object that says that it is the function."""
    return functools.update_wrapper(functools.partial(scaled(function, 0.75)), function)


class Scaled:
    """A callable object."""

    def __init__(self, function: Any):
        self.function = scaled(function, 0.75)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@contextlib.contextmanager
def _counted(calls: list[int]) -> Iterator[None]:
    calls.append(1)
    yield


def of(owner: Any, name: str, wrap: Any) -> Patch:
    return lambda m: m.setattr(owner, name, wrap(getattr(owner, name)))


def _other_registry(m: pytest.MonkeyPatch) -> None:
    other = AttentionInterface()
    other["sdpa"] = scaled(other["sdpa"], 0.75)
    m.setattr(llama, "ALL_ATTENTION_FUNCTIONS", other)


def _other_look_up(m: pytest.MonkeyPatch) -> None:
    old = AttentionInterface.get_interface
    m.setattr(AttentionInterface, "get_interface", lambda self, *args: scaled(old(self, *args), 0.75))


OBJECTS: dict[str, Patch] = {
    "torch's function, an object": of(functional, "silu", Scaled),
    "torch's function, a partial": of(functional, "linear", as_object),
    "torch's attention, an object": of(functional, "scaled_dot_product_attention", Scaled),
    "the rotation, a partial": of(llama, "rotate_half", as_object),
    "the rotation, torch's function": lambda m: m.setattr(llama, "rotate_half", torch.neg),
    "a registry's entry, a partial": lambda m: m.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", as_object(ALL_ATTENTION_FUNCTIONS["sdpa"])
    ),
    "another registry": _other_registry,
    "how a registry finds its entries": _other_look_up,
    "autocast": of(llama.LlamaMLP, "forward", torch.autocast("cpu", torch.bfloat16)),
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["exact", "flash"])
@pytest.mark.parametrize("case", OBJECTS)
def test_objects_in_the_place_of_functions_run(
    case: str, recipe: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = patched(recipe)
    before = last_logits(plain)
    OBJECTS[case](monkeypatch)
    assert not torch.allclose(last_logits(plain), before)
    assert_alike(model, plain, full_batch())


def test_a_callers_context_manager_around_a_forward_is_entered(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = patched()
    calls: list[int] = []
    monkeypatch.setattr(llama.LlamaMLP, "forward", _counted(calls)(llama.LlamaMLP.forward))
    entered = []
    for one in (plain, model):
        calls.clear()
        last_logits(one)
        entered.append(len(calls))
    assert entered[1] >= entered[0] > 0  # steps as on a GPU are tried once before


IDENTITY: dict[str, tuple[Any, str]] = {
    "linear layers": (nn.Linear, "forward"),
    "their function": (functional, "linear"),
    "every module": (nn.Module, "__call__"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["smoothquant", "smoothquant-static"])
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "mixtral"])
@pytest.mark.parametrize("case", IDENTITY)
def test_smoothed_layers_give_wrappers_the_weight_of_their_inputs(
    case: str, name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = CAUSAL[name].make(), CAUSAL[name].make()
    accelpatch.patch(model, recipe, verify=False)
    with torch.no_grad():
        due = plain(**full_batch()).logits
        packed = (model(**full_batch()).logits - due).norm()
        owner, attribute = IDENTITY[case]
        monkeypatch.setattr(owner, attribute, (lambda old: lambda *args, **kwargs: old(*args, **kwargs))(
            getattr(owner, attribute)
        ))  # fmt: skip
        assert (model(**full_batch()).logits - due).norm() < 2 * packed  # with inputs that are not rounded: less


class Reversed(nn.ModuleList):
    """A list that hands its layers out in the other order."""

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[::-1] if isinstance(index, slice) else super().__getitem__(index)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules.values())[::-1])


def test_lists_of_layers_of_others_are_followed(machine: str) -> None:
    plain, model = patched()
    for one in (plain, model):
        one.model.layers.__class__ = Reversed
    torch.testing.assert_close(last_logits(model), last_logits(plain), rtol=1e-4, atol=1e-4)


class Half(nn.Linear):
    """A linear layer of others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


def test_modules_that_were_put_in_later_are_watched(machine: str) -> None:
    plain, model = patched()
    for one in (plain, model):
        torch.manual_seed(0)
        one.model.layers[1].self_attn.q_proj = nn.Linear(64, 64, bias=False)
        one.lm_head = nn.Linear(64, one.config.vocab_size, bias=False)
        last_logits(one)
    for one in (plain, model):
        one.model.layers[1].self_attn.q_proj.__class__ = Half
    assert_alike(model, plain, full_batch())
    for one in (plain, model):
        one.lm_head.__class__ = Half
    assert_alike(model, plain, full_batch())


def test_a_model_called_inside_a_running_call_of_another_is_looked_at(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, outer), (plain, inner) = patched(), patched(name="qwen2")
    monkeypatch.setattr(qwen2.Qwen2MLP, "forward", scaled(qwen2.Qwen2MLP.forward, 0.5))
    found = []

    def ask(ids: Any, scores: Any) -> Any:
        found.append(last_logits(inner))
        return scores

    outer.generate(**full_batch(), max_new_tokens=1, logits_processor=LogitsProcessorList([ask]))
    torch.testing.assert_close(found[0], last_logits(plain), rtol=1e-4, atol=1e-4)


def test_compiled_models_run_what_is_there_when_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = patched()
    monkeypatch.setattr(llama.LlamaMLP, "forward", scaled(llama.LlamaMLP.forward, 0.5))
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(**full_batch()).logits
        torch.testing.assert_close(found, plain(**full_batch()).logits, rtol=1e-4, atol=1e-4)


def _five(self: Any, ids: Any, scores: torch.Tensor) -> torch.Tensor:
    made = torch.full_like(scores, -1e9)
    made[:, 5] = 0
    return made


PICKING: dict[str, tuple[type, Any]] = {
    "a processor": (MinNewTokensLengthLogitsProcessor, _five),
    "all processors": (LogitsProcessorList, _five),
    "a criterion": (EosTokenCriteria, lambda self, ids, scores, **kwargs: ids[:, -1] == ids[:, -1]),
}


@pytest.mark.parametrize("case", PICKING)
def test_processors_and_criteria_of_others_pick(case: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = patched()
    options = {"max_new_tokens": 5, "min_new_tokens": 3, "eos_token_id": 7, "do_sample": False}
    before = plain.generate(**full_batch(), **options)
    kind, function = PICKING[case]
    monkeypatch.setattr(kind, "__call__", function)
    due = plain.generate(**full_batch(), **options)
    assert due.tolist() != before.tolist()
    assert model.generate(**full_batch(), **options).tolist() == due.tolist()


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_experts_run_an_other_gate(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = patched(recipe, "mixtral")
    with torch.no_grad():
        before = model(**full_batch()).logits
        monkeypatch.setattr(mixtral.MixtralExperts, "_apply_gate", lambda self, x: 0 * x.chunk(2, -1)[0])
        nothing = model(**full_batch()).logits
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda module, args, output: 0 * output)
        torch.testing.assert_close(nothing, model(**full_batch()).logits)
    assert not torch.allclose(before, nothing)


def test_a_copy_made_while_attention_stands_aside_takes_it_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = patched("flash")
    own = model.config._attn_implementation
    with monkeypatch.context() as m:
        m.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", scaled(ALL_ATTENTION_FUNCTIONS["sdpa"], 0.5))
        last_logits(model)
        made = copy.deepcopy(model)
        assert made.config._attn_implementation == "sdpa"
    last_logits(made)
    assert made.config._attn_implementation == own


@pytest.mark.parametrize("find", [lambda model: model.model.layers, lambda model: model.model.layers[1]._modules])
def test_compiled_children_stay_and_run(find: Any, machine: str) -> None:
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    for one in (plain, model):
        found = find(one)
        name = 1 if isinstance(found, nn.ModuleList) else "mlp"
        found[name] = torch.compile(found[name], backend="eager")
    accelpatch.patch(model, "exact", verify=False)
    assert_alike(model, plain, full_batch())


def test_attention_that_the_user_registered_is_kept() -> None:
    AttentionInterface.register("mine", scaled(ALL_ATTENTION_FUNCTIONS["sdpa"], 0.5))
    AttentionMaskInterface.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    plain, model = CAUSAL["llama"].make(), CAUSAL["llama"].make()
    for one in (plain, model):
        one.set_attn_implementation("mine")
    accelpatch.patch(model, "flash", verify=False)
    assert_alike(model, plain, full_batch())
    reasons = [site.reason for site in model.accelpatch.report().sites if site.role == "attention"]
    assert set(reasons) == {"the attention implementation mine is not one of transformers'"}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_wrappers_write_into_smoothed_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = patched("smoothquant", name)
    layer = next(one for one in model.modules() if hasattr(one, "factors") and one.factors is not None)
    before, kind = layer.weight.clone(), type(layer).replaced_class
    old = kind.forward

    def halving(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is layer:
            self.weight.mul_(0.5)
        return old(self, x)

    with monkeypatch.context() as m, torch.no_grad():
        m.setattr(kind, "forward", halving)
        model(**full_batch())
    torch.testing.assert_close(layer.weight, 0.5 * before, rtol=1e-4, atol=1e-4)
