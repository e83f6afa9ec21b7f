"""Blocks run one after the other: on what those before them gave, with the model's own masks and angles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelpatch.patching.blocks import Blocks, block_of, blocks_of
from tests.support.tiny import CAUSAL, full_batch, padded_batch

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "lm_head",
    "model.layers.0.mlp.up_proj",
    "model.layers.1.mlp.up_proj",
    "h.2",
]


def test_paths() -> None:
    assert blocks_of(PATHS) == {"model.layers.0": [PATHS[0], PATHS[2]], "model.layers.1": [PATHS[3]], "h.2": ["h.2"]}
    assert block_of("vision.stages.0.blocks.1.fc") == "vision.stages.0"
    assert block_of("lm_head") is None


def blocks_in(model: Any) -> list[str]:
    return list(blocks_of(path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "mixtral"])
def test_each_block_gets_what_it_gets_in_the_model(name: str) -> None:
    model = CAUSAL[name].make()
    batches = [dict(full_batch()), dict(padded_batch())]
    inputs: dict[str, list[Any]] = {}
    calls = 0

    def see(block: str) -> Any:
        return lambda module, args, kwargs: inputs.setdefault(block, []).append((args, dict(kwargs)))

    blocks = blocks_in(model)
    hooks = [model.get_submodule(block).register_forward_pre_hook(see(block), with_kwargs=True) for block in blocks]
    with torch.no_grad():
        for batch in batches:
            model(**batch, use_cache=False)
    due, inputs = inputs, {}

    def step() -> None:
        nonlocal calls
        calls += 1

    runner = Blocks(model, [batch | {"use_cache": False} for batch in batches])
    for block in blocks:
        inputs.clear()
        runner.run(block, False, step)
        for got, want in zip(inputs[block], due[block], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        runner.run(block, True, step)
    assert calls == 2 * len(blocks) * len(batches)
    for hook in hooks:
        hook.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_later_blocks_see_a_changed_weight_of_an_earlier_one() -> None:
    model = CAUSAL["llama"].make()
    first, second = blocks_in(model)[:2]
    runner = Blocks(model, [full_batch() | {"use_cache": False}])
    with torch.no_grad():
        weight = model.get_submodule(first).mlp.down_proj.weight
        before = weight.clone()
        weight.zero_()
        runner.run(first, True, lambda: None)
        weight.copy_(before)
    seen: list[Any] = []
    hook = model.get_submodule(second).register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    runner.run(second, False, lambda: None)
    with torch.no_grad():
        model(**full_batch())
    hook.remove()
    assert not seen[0].equal(seen[1])


def test_what_a_model_raises_leaves_it_as_it_was() -> None:
    model = CAUSAL["llama"].make()
    first, second = blocks_in(model)[:2]
    runner = Blocks(model, [full_batch() | {"use_cache": False}])
    runner.run(first, True, lambda: None)
    module = model.get_submodule(second).mlp

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("here")

    hook = module.register_forward_pre_hook(broken)
    with pytest.raises(ZeroDivisionError, match="here"):
        runner.run(second, False, lambda: None)
    hook.remove()
    assert not any("forward" in vars(one) or one._forward_hooks for one in model.modules())
