"""What counts as the code of a package, case by case."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
import transformers.models.mistral.modeling_mistral as mistral
from torch import nn
from transformers.models.gemma2 import modeling_gemma2

from accelpatch.own_code import Reached, Snapshot
from accelpatch.own_code.defined import codes_of, dotted_names, home_of

OLD = llama.LlamaMLP.forward


def _other(self: Any, x: Any) -> Any:
    return OLD(self, x)


class _Callable:
    def __call__(self, x: Any) -> Any:
        return x


def _with(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    return types.FunctionType(code, namespace, "forward")


FORWARDS: dict[str, Any] = {
    "a function": _other,
    "a wrapper that says it is the original": functools.wraps(OLD)(lambda self, x: OLD(self, x)),
    "a partial function": functools.partialmethod(OLD),
    "a callable object": _Callable(),
    "a mock": Mock(),
    "a static method": staticmethod(lambda x: x),
    "a class method": classmethod(lambda cls, x: x),
    "a property": property(lambda self: lambda x: x),
    "nothing": None,
    "the same function of another family": mistral.MistralMLP.forward,
    "another function of the family": llama.LlamaRMSNorm.forward,
    "other constants": _with(OLD.__code__.replace(co_consts=(*OLD.__code__.co_consts, 1.5)), OLD.__globals__),
    "another decorated by a package": torch.no_grad()(_other),
    "itself within autocast": torch.autocast("cpu", torch.bfloat16)(OLD),
    "itself within a caller's context": contextlib.contextmanager(lambda: iter([None]))()(OLD),
    "a partial object that says it is the original": functools.update_wrapper(functools.partial(OLD), OLD),
    "its code among other names": _with(OLD.__code__, {"__name__": "elsewhere"}),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_other_code_in_the_place_of_a_method(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Reached(llama.LlamaMLP)
    snapshot = Snapshot([llama.LlamaMLP.__new__(llama.LlamaMLP)])
    assert before.reason is None
    with monkeypatch.context() as patch:
        patch.setattr(llama.LlamaMLP, "forward", FORWARDS[case])
        reason = Reached(llama.LlamaMLP).reason
        assert reason is not None
        assert reason.startswith("LlamaMLP.forward is ")
        assert before.changed()
        assert snapshot.changed()
    assert not before.changed()
    assert not snapshot.changed()


DECORATED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda old: old,
    "torch's decorator": torch.no_grad(),
    "torch.compile": torch.compile,
    "inference mode": torch.inference_mode(),
}


@pytest.mark.parametrize("case", DECORATED)
def test_what_a_package_decorates_is_its_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.LlamaMLP, "forward", DECORATED[case](OLD))
    assert Reached(llama.LlamaMLP).reason is None


FUNCTIONS: dict[str, Any] = {
    "a function": lambda x: x,
    "a partial function": functools.partial(llama.rotate_half),
    "one with its name": functools.update_wrapper(functools.partial(llama.rotate_half), llama.rotate_half),
    "torch's": torch.neg,
    "a callable object": _Callable(),
    "a mock": Mock(),
    "the same of another family": mistral.rotate_half,
    "another of the module": llama.repeat_kv,
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_other_code_in_the_place_of_a_function(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "rotate_half", FUNCTIONS[case])
    reason = Reached(llama.LlamaAttention).reason
    assert reason is not None
    assert "modeling_llama.rotate_half is" in reason


TORCHS: dict[str, Any] = {
    "a function": lambda *args: args[0],
    "a partial function": functools.partial(nn.functional.linear),
    "a callable object": _Callable(),
    "a mock": Mock(),
    "another of torch": torch.relu,
}


@pytest.mark.parametrize("case", TORCHS)
def test_other_code_in_the_place_of_a_function_of_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Reached(nn.Linear)
    assert before.reason is None
    monkeypatch.setattr(nn.functional, "linear", TORCHS[case])
    assert before.changed()
    assert "torch.nn.functional.linear is" in str(Reached(nn.Linear).reason)


def test_reasons_name_the_wrapper_and_not_what_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.LlamaMLP, "forward", functools.wraps(OLD)(_other))
    assert f"LlamaMLP.forward is _other of {__name__}" in str(Reached(llama.LlamaMLP).reason)


def test_a_subclass_counts_by_what_its_forward_reaches() -> None:
    unused = type("Unused", (llama.LlamaMLP,), {"helper": lambda self: 1, "__init__": lambda self: None})
    assert Reached(unused).reason is None
    hidden = type("Hidden", (llama.LlamaMLP,), {"up_proj": property(lambda self: self.gate_proj)})
    assert "Hidden.up_proj" in str(Reached(hidden).reason)
    named = type("LlamaMLP", (nn.Module,), {"forward": lambda self, x: x})
    assert "LlamaMLP.forward" in str(Reached(named).reason)
    helped = type("Helped", (modeling_gemma2.Gemma2RMSNorm,), {"_norm": lambda self, x: x})
    assert "Helped._norm" in str(Reached(helped).reason)


def test_a_snapshot_sees_what_an_instance_gets() -> None:
    norm, mlp = modeling_gemma2.Gemma2RMSNorm(8), nn.Linear(2, 2)
    snapshot = Snapshot([norm, mlp])
    norm.anything = 1
    assert not snapshot.changed()
    norm._norm = lambda x: x
    assert snapshot.changed()
    del norm._norm
    mlp.__class__ = type("Own", (nn.Linear,), {})
    assert snapshot.changed()


def test_what_a_module_defines() -> None:
    name = llama.__name__
    assert codes_of(name)["LlamaMLP.forward"] == (OLD.__code__,)
    assert codes_of("math") == {}
    assert home_of(name, "rotate_half") == (name, "rotate_half")
    assert home_of(name, "create_causal_mask") == ("transformers.masking_utils", "create_causal_mask")
    assert home_of(name, "LlamaMLP") is None
    assert home_of(name, "nothing") is None
    assert ("nn", "functional", "softmax") in dotted_names(llama.eager_attention_forward.__code__)
    assert ("self", "down_proj") in dotted_names(OLD.__code__)
