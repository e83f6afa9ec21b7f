"""Numbers that are changed on a patched model are seen by its next native step, as its modules see them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from tests.runtime.cpu.test_native_step import by_modules, decode, native_steps, patched, pytestmark  # noqa: F401
from tests.support.tiny import CAUSAL, full_batch, padded_batch


def _final_cap(model: Any) -> None:
    model.config.final_logit_softcapping = 0.5


def _attention_cap(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.1
    model.config.attn_logit_softcapping = 0.1


def _rotary_scale(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 2.0


def _frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.25)


def _one_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def _one_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.01


def _one_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 3.0


def _one_cap(model: Any) -> None:
    model.model.layers[1].self_attn.attn_logit_softcapping = 0.05


def _sinks(model: Any) -> None:
    model.model.layers[1].self_attn.sinks.add_(3.0)


def _new_sinks(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.full((4,), 2.0))


def _sinks_behind_the_count(model: Any) -> None:
    model.model.layers[1].self_attn.sinks.data.fill_(4.0)


def _router(model: Any) -> None:
    model.model.layers[0].mlp.router.weight.neg_()


def _router_bias(model: Any) -> None:
    model.model.layers[0].mlp.router.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 9.0]))


def _other_experts(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.load_state_dict({name: one.flip(0) for name, one in experts.state_dict().items()})


CHANGES: list[tuple[str, Callable[[Any], None]]] = [
    ("gemma2", _final_cap), ("gemma2", _attention_cap), ("gemma2", _one_cap), ("llama", _rotary_scale),
    ("llama", _frequencies), ("llama", _one_activation), ("llama", _one_scaling), ("llama", _one_epsilon),
    ("gpt_oss", _sinks), ("gpt_oss", _new_sinks), ("gpt_oss", _sinks_behind_the_count), ("gpt_oss", _router),
    ("gpt_oss", _router_bias), ("gpt_oss", _other_experts),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=lambda one: getattr(one, "__name__", one))
@torch.no_grad()
def test_a_change_is_seen(name: str, change: Callable[[Any], None]) -> None:
    model, reference = patched(name), by_modules(patched(name))
    before = decode(model, padded_batch(), 6)
    assert native_steps(model) == 6
    for one in (model, reference):
        change(one)
    found, due = decode(model, padded_batch(), 6), decode(reference, padded_batch(), 6)
    assert not torch.allclose(due, before, rtol=1e-3, atol=1e-3), "the change shows in nothing"
    assert (found - due).norm() < 1e-4 * due.norm()


def test_a_patch_takes_no_random_numbers() -> None:
    """A script that samples after the patch draws what it would have drawn."""
    model = CAUSAL["llama"].make()
    torch.manual_seed(5)
    due = torch.rand(4)
    torch.manual_seed(5)
    accelpatch.patch(model, "int8")
    assert torch.equal(torch.rand(4), due)


def test_threads_that_meet_at_the_first_use_patch_once() -> None:
    model, patches = CAUSAL["llama"].make(), []
    found: list[torch.Tensor] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        with torch.no_grad():
            found.append(model(**padded_batch()).logits)

    with accelpatch.patch_on_first_use("int8", verify=False, on_patched=patches.append):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert patches == [model]
    assert len(found) == 4
    assert all(torch.allclose(one, found[0], atol=1e-5) for one in found)


def test_a_changed_weight_child_or_dtype_is_seen() -> None:
    model, batch = patched("llama"), full_batch()
    model.generate(**batch, max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.linspace(-1, 1, 64))  # in place: the step reads the same memory
    model.model.layers[0].input_layernorm.weight = nn.Parameter(torch.linspace(0.5, 2, 64))
    found = decode(model, batch, 3)
    torch.testing.assert_close(found, decode(by_modules(copy.deepcopy(model)), batch, 3), rtol=1e-4, atol=1e-4)
    steps = native_steps(model)
    assert steps == 2 + 3
    model.to(torch.bfloat16)
    decode(model, batch, 2)
    assert native_steps(model) == steps
