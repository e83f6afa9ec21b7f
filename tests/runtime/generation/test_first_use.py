"""The first use of a model, however it comes: it is patched then."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import accelpatch
from accelpatch import own_code
from tests.support.first_use import IDS, first_use, is_patched, patched_alike
from tests.support.lora import adapted
from tests.support.nested import t5
from tests.support.packed import replacements
from tests.support.tiny import CAUSAL, make


def _forward(model: Any) -> Tensor:
    return model.forward(IDS).logits


def _forward_by_name(model: Any) -> Tensor:
    """As sentence-transformers calls it."""
    method = getattr(model, "forward", None)
    assert method is not None
    known = inspect.signature(method).parameters
    given = {"input_ids": IDS, "return_dict": True, "modality": "text"}
    return method(**{name: value for name, value in given.items() if name in known}).logits


def _forward_kept(model: Any) -> Tensor:
    """A bound method that was taken before the first use."""
    forward = model.forward
    assert isinstance(forward, types.MethodType)
    forward(IDS)
    return forward(IDS).logits


def _forward_of_the_class(model: Any) -> Tensor:
    return type(model).forward(model, IDS).logits


def _forward_on_the_instance(model: Any) -> Tensor:
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return model.forward(IDS).logits


def _by_a_wrapper(model: Any) -> Tensor:
    """A module of another library around it, which is no model."""

    class Embedder(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.auto_model = inner

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.auto_model.forward(ids).logits
            return found

    made: Tensor = Embedder(model)(IDS)
    return made


def _by_data_parallel(model: Any) -> Tensor:
    found: Tensor = nn.DataParallel(model)(IDS).logits
    return found


def _by_generate_of_the_class(model: Any) -> Tensor:
    type(model).generate(model, IDS, max_new_tokens=2, do_sample=False)
    return _forward(model)


USES: dict[str, Callable[[Any], Tensor]] = {
    "forward": _forward, "forward by name": _forward_by_name, "forward kept": _forward_kept,
    "forward of the class": _forward_of_the_class, "forward on the instance": _forward_on_the_instance,
    "by a wrapper": _by_a_wrapper, "by DataParallel": _by_data_parallel,
    "generate of the class": _by_generate_of_the_class,
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_model_is_patched_however_it_is_called(use: Callable[[Any], Tensor]) -> None:
    due = patched_alike()
    model = CAUSAL["llama"].make()
    with first_use() as said:
        torch.testing.assert_close(use(model), due, rtol=1e-4, atol=1e-5)
    assert said == [("LlamaForCausalLM", "patched")]
    assert is_patched(model)


def test_a_model_with_adapters_whose_tuner_calls_its_forward() -> None:
    model = adapted(CAUSAL["llama"].make())
    with first_use() as said:
        model(input_ids=IDS)
    assert said == [("LlamaForCausalLM", "patched")]


def test_a_forward_of_a_class_that_is_no_model() -> None:
    """transformers' heads for classification are mixins, whose forward others may replace meanwhile."""
    model: Any = make("Llama", suffix="ForSequenceClassification", **CAUSAL["llama"].config)
    head = transformers.modeling_layers.GenericForSequenceClassification
    calls: list[int] = []
    own = head.forward
    with pytest.MonkeyPatch.context() as patch, first_use() as said:
        model.forward(IDS)
        assert said == [("LlamaForSequenceClassification", "patched")]
        patch.setattr(head, "forward", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
        model(IDS)
        assert calls == [1]
    own_code.refresh()


def test_a_class_that_is_defined_meanwhile() -> None:
    with first_use() as said:

        class Own(LlamaForCausalLM):
            def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
                return super().forward(input_ids, **kwargs)

        torch.manual_seed(0)
        model = Own(CAUSAL["llama"].make().config).eval()
        model.forward(IDS)
    assert said[0] == ("Own", "patched")


def test_a_forward_that_others_replaced_meanwhile() -> None:
    """As Liger does; the whole model is met all the same, and their forward runs."""
    model, calls = CAUSAL["llama"].make(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)  # what the class has again at the end
        with first_use() as said:
            own = LlamaForCausalLM.forward
            patch.setattr(LlamaForCausalLM, "forward", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
            model(IDS)
            model.generate(IDS, max_new_tokens=2, do_sample=False)  # type: ignore[operator]
    assert said[0] == ("LlamaForCausalLM", "patched")
    assert len(calls) >= 2
    own_code.refresh()


PARTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "model.model()": (CAUSAL["llama"].make, lambda model: model.model(IDS), "model"),
    "base_model.forward()": (CAUSAL["llama"].make, lambda model: model.base_model.forward(IDS), "model"),
    "get_decoder()": (CAUSAL["llama"].make, lambda model: model.get_decoder()(input_ids=IDS), "model"),
    "get_encoder()": (t5, lambda model: model.get_encoder()(input_ids=IDS), "encoder"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_model_of_which_a_part_is_used(part: str) -> None:
    """The part is patched; the whole takes its place once it is used."""
    made, use, name = PARTS[part]
    model = made()
    inner = model.get_submodule(name)
    with first_use() as said:
        use(model)
        assert is_patched(inner)
        assert said == [(type(inner).__name__, "patched")]
        more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        model.forward(input_ids=IDS, **more)
        assert is_patched(model)
        assert "accelpatch" not in vars(inner)
    accelpatch.unpatch(model)
    assert replacements(model) == []
