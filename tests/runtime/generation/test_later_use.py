"""Models that are patched at a later use than their first, or left, with the reason."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.generation import GenerationMixin

from accelpatch import own_code
from tests.support.first_use import IDS, first_use, is_patched, patched_alike
from tests.support.packed import replacements
from tests.support.tiny import CAUSAL

TRAINED = "left as it is so far: it was called in training mode"


def test_a_model_that_trains_first_is_patched_in_eval_mode() -> None:
    model, due = CAUSAL["llama"].make().train(), patched_alike()
    with first_use() as said:
        for _ in range(2):
            with torch.enable_grad():
                model(IDS, labels=IDS).loss.backward()
        assert said == [("LlamaForCausalLM", TRAINED)]
        assert replacements(model) == []
        model.eval()
        torch.testing.assert_close(model(IDS).logits, due, rtol=1e-4, atol=1e-5)
    assert said[1:] == [("LlamaForCausalLM", "patched")]


def test_a_frozen_part_of_a_model_that_trains_is_left_alone() -> None:
    """In eval mode itself, as it stays, and used by itself before."""
    model: Any = CAUSAL["llama"].make()
    with first_use() as said:
        model.model(IDS)
        model.training = True
        model(IDS)
        assert replacements(model) == []
        model.model(IDS)
        assert replacements(model) == []
        model.eval()
        model(IDS)
    assert said == [("LlamaModel", "patched"), ("LlamaForCausalLM", TRAINED), ("LlamaForCausalLM", "patched")]


def test_a_model_that_trains_in_generate_is_left() -> None:
    model: Any = CAUSAL["llama"].make().train()
    with first_use() as said:
        model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert said == [("LlamaForCausalLM", TRAINED)]


def test_a_model_on_the_meta_device_is_patched_once_it_has_weights() -> None:
    full: Any = CAUSAL["llama"].make()
    with torch.device("meta"):
        model: Any = type(full)(full.config).eval()
    with first_use() as said:
        assert model(IDS.to("meta")).logits.is_meta
        model.to_empty(device="cpu")
        model.load_state_dict(full.state_dict())
        model.model.rotary_emb = full.model.rotary_emb
        model(IDS)
    assert said == [
        ("LlamaForCausalLM", "left as it is so far: it was called on the meta device, without weights"),
        ("LlamaForCausalLM", "patched"),
    ]


def test_a_functional_call_keeps_its_own_weights() -> None:
    model = CAUSAL["llama"].make()
    held = dict(model.named_parameters())
    other = {name: 0.5 * tensor for name, tensor in held.items()}
    due = torch.func.functional_call(model, other, IDS).logits
    with first_use() as said:
        assert torch.equal(torch.func.functional_call(model, other, IDS).logits, due)
        assert replacements(model) == []
        assert all(one is held[name] for name, one in model.named_parameters())
        model(IDS)
        assert is_patched(model)
        assert torch.equal(torch.func.functional_call(model, other, IDS).logits, due)
    assert "by torch.func.functional_call" in said[0][1]
    assert said[1:] == [
        ("LlamaForCausalLM", "patched"),
        ("LlamaForCausalLM", "unpatched, since the script asked for its parameters"),
    ]


def test_a_call_that_asks_for_a_gradient_is_not_the_first_use() -> None:
    model = CAUSAL["llama"].make()
    with first_use() as said:
        with torch.enable_grad():
            model(IDS, labels=IDS).loss.backward()
        assert all(one.grad is not None for one in model.parameters())
        assert said == [("LlamaForCausalLM", "left as it is so far: the script asked for a gradient")]
        model(IDS, labels=IDS)
    assert is_patched(model)


def test_a_copy_of_a_patched_model_is_on_demand_for_itself() -> None:
    model: Any = CAUSAL["llama"].make()
    with first_use() as said:
        model(IDS)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(IDS).logits, model(IDS).logits)
        copied.train()
        assert replacements(copied) == []
        assert is_patched(model)
        again = copy.deepcopy(CAUSAL["llama"].make())
        again(IDS)
        assert is_patched(again)
    assert [line for _, line in said] == ["patched", "unpatched, since the script asked for training mode", "patched"]


UNSEEN = "left as it is: no call of it as a whole was seen (torch.compile and DataParallel call it unseen)"


def test_a_model_that_is_compiled_first_stays_and_is_named() -> None:
    """And torch warns of no hooks of ours."""
    due = CAUSAL["llama"].make()(IDS).logits
    with warnings.catch_warnings(), first_use("exact") as said:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        model = CAUSAL["llama"].make()
        found = torch.compile(model, backend="eager")(IDS).logits
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-5)
    assert replacements(model) == []
    assert said == [("LlamaForCausalLM", UNSEEN)]


def test_a_model_that_was_compiled_in_place_is_left_with_the_reason() -> None:
    model = CAUSAL["llama"].make()
    with first_use("exact") as said:
        model.compile(backend="eager")
        model(IDS)
    assert "the model is compiled" in said[0][1]


def test_models_that_are_never_called_are_named() -> None:
    with first_use() as said:
        model: Any = CAUSAL["llama"].make()
        gone: Any = CAUSAL["gpt2"].make()
        model.model.layers[0].mlp(torch.zeros(1, 2, 64))
        assert said == []
        del gone
        gc.collect()
    assert said == [("LlamaForCausalLM", UNSEEN)]


def replica(module: nn.Module) -> nn.Module:
    """As DataParallel makes one for a GPU."""
    made: nn.Module = module._replicate_for_data_parallel()  # type: ignore[operator]
    made._parameters.update(module._parameters)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else replica(child)
    return made


def test_copies_of_data_parallel_are_not_patched() -> None:
    model = CAUSAL["llama"].make()
    with first_use() as said:
        replica(model)(IDS)
    assert said == []
    assert replacements(model) == []


def test_several_models_in_threads() -> None:
    names = ("llama", "gpt2", "opt", "mistral")
    models: list[Any] = [CAUSAL[name].make() for name in names for _ in range(2)]
    due = [patched_alike(CAUSAL[name].make()) for name in names for _ in range(2)]
    found: dict[int, Tensor] = {}
    start = threading.Barrier(len(models))

    def run(place: int) -> None:
        start.wait()
        with torch.no_grad():
            call = models[place] if place % 2 else models[place].forward
            found[place] = call(IDS).logits

    with first_use() as said:
        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [line for _, line in said] == ["patched"] * len(models)
    for place, one in enumerate(due):
        torch.testing.assert_close(found[place], one, rtol=1e-4, atol=1e-5)


def _methods() -> dict[tuple[type, str], Any]:
    classes = [PreTrainedModel, LlamaForCausalLM, transformers.LlamaModel, transformers.LlamaForSequenceClassification]
    classes += [transformers.T5ForConditionalGeneration, GenerationMixin]
    names = ("__call__", "__init__", "__init_subclass__", "forward", "generate", "init_continuous_batching")
    return {(cls, name): vars(cls).get(name) for cls in classes for name in names}


def test_transformers_is_as_it_was_after_the_context() -> None:
    before, model = _methods(), CAUSAL["llama"].make()
    with first_use():
        kept = LlamaForCausalLM.forward
        assert _methods() != before
        assert own_code.reached_by(LlamaForCausalLM).reason is None  # what is put in place here is ours
    assert _methods() == before
    assert kept(model, IDS).logits.shape[-1] == 160  # whoever took it meanwhile may go on using it
    assert replacements(model) == []


def test_what_others_put_in_place_meanwhile_stays() -> None:
    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs)

    before = vars(LlamaForCausalLM)["forward"]
    try:
        with first_use():
            own = LlamaForCausalLM.forward
            LlamaForCausalLM.forward = other  # type: ignore[method-assign]
        assert LlamaForCausalLM.forward is other
        model = CAUSAL["llama"].make()
        model(IDS)
        assert replacements(model) == []
    finally:
        LlamaForCausalLM.forward = before  # type: ignore[method-assign]
    own_code.refresh()
