"""Weights made by calibration, GPTQ and AWQ: on every family, better than rounding, saved, undone, and resumed."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import PatchError, PlanError, RecipeError
from accelpatch.models.texts import windows
from accelpatch.modules.quantized_linear import Int4WeightOnlyLinear, Int8WeightOnlyLinear
from accelpatch.patching.blocks import Blocks
from accelpatch.quant.hessian import Hessians
from accelpatch.recipe import methods
from accelpatch.recipe import recipe as recipes
from tests.support.simulated import logits
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, EXPERTS, Tiny, full_batch, snapshot

FAMILIES = {name: tiny for name, tiny in CAUSAL.items() if tiny.linears}
TEXT = {"samples": 8, "length": 64}


def recipe(method: str, bits: int = 4) -> recipes.Recipe:
    return methods.by_method(methods.of_bits(bits), method, **TEXT)


def correlated(name: str = "llama") -> Any:
    """A model whose activations have few directions and a few large channels, as those of trained ones."""
    model = CAUSAL[name].make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                n, k = module.weight.shape
                large = torch.ones(k)
                large[torch.randperm(k, generator=generator)[: k // 8]] = 8
                few = torch.randn(n, 6, generator=generator) @ torch.randn(6, k, generator=generator)
                module.weight.copy_((few + 0.2 * torch.randn(n, k, generator=generator)) * large * 0.3)
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    kinds = (Int4WeightOnlyLinear, Int8WeightOnlyLinear)
    return {path: module.weight.detach().clone() for path, module in model.named_modules() if isinstance(module, kinds)}


@pytest.mark.each_value
@spread("tiny, method", FAMILIES, ("gptq", "gptq+awq"))
def test_every_family_and_the_way_back(tiny: Tiny, method: str) -> None:
    model, batch = tiny.make(), full_batch()
    before, due = snapshot(model), logits(model, batch)
    accelpatch.patch(model, recipe(method), progress=False)
    report = model.accelpatch.report()
    made = [site for site in report.sites if site.replacer == "int4_weight_only"]
    assert {site.role for site in made} <= tiny.linears.keys()
    assert logits(model, batch).sub(due).norm() < 0.6 * due.norm()
    accelpatch.unpatch(model)
    assert snapshot(model) == before
    assert logits(model, batch).equal(due)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_method_is_nearer_to_the_original(name: str) -> None:
    errors = {}
    for method in methods.METHODS:
        model = correlated(name)
        text = windows(model, None, None, *TEXT.values())[0]
        due = logits(model, text)
        accelpatch.patch(model, recipe(method), verify=False, progress=False)
        errors[method] = float(logits(model, text).sub(due).norm() / due.norm())
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert errors["awq"] < errors["rtn"]
    assert errors["gptq+awq"] < 0.8 * errors["rtn"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, tmp_path: Path) -> None:
    """Rounded for the tokens that are routed to each; transposed and interleaved weights too."""
    plain, made, errors = EXPERTS[name].make(), [], []
    path = next(path for path, module in plain.named_modules() if path.endswith("experts"))
    seen: list[Any] = []
    hook = plain.get_submodule(path).register_forward_hook(lambda *call: seen.append(call), with_kwargs=True)
    with torch.no_grad():
        plain(**windows(plain, None, None, *TEXT.values())[0])
    hook.remove()
    (_, args, kwargs, due) = seen[-1]
    for method in ("rtn", "gptq", "gptq"):
        model = EXPERTS[name].make()
        before = snapshot(model)
        accelpatch.patch(model, recipe(method), progress=False, resume=tmp_path if method == "gptq" else None)
        with torch.no_grad():
            made.append(model.get_submodule(path)(*args, **kwargs))
        errors.append(float((made[-1] - due).norm() / due.norm()))
        accelpatch.unpatch(model)
        assert snapshot(model) == before
    assert errors[1] < 0.85 * errors[0]
    assert made[2].equal(made[1])  # from what the second run kept


def test_an_expert_that_no_token_reaches_is_rounded_to_the_nearest() -> None:
    model = EXPERTS["mixtral"].make()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # the same two of four experts for every token
    accelpatch.patch(model, recipe("gptq"), verify=False, progress=False)
    due = f"{4 * len(model.model.layers)} weights: of experts that no calibration token reached: rounded to the nearest"
    assert any(note.startswith(due) for note in model.accelpatch.report().notes)


def test_moments_of_a_block_are_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the garbage is collected: in a large model they are gigabytes a block."""
    alive, most = WeakSet[Hessians](), list[int]()
    stock, run = Hessians.see, Blocks.run

    def see(self: Hessians, path: str, x: Tensor) -> None:
        alive.add(self)
        stock(self, path, x)

    def counted(self: Blocks, block: str, finish: bool, step: Any) -> None:
        run(self, block, finish, step)
        most.append(len(alive))

    monkeypatch.setattr(Hessians, "see", see)
    monkeypatch.setattr(Blocks, "run", counted)
    model = correlated()
    gc.disable()
    try:
        accelpatch.patch(model, recipe("gptq"), verify=False, progress=False)
    finally:
        gc.enable()
    assert len(most) == 2 * len(model.model.layers)
    assert max(most) <= 2  # those of the block before go when the next is observed


def test_what_is_read_back_is_the_weight_without_smoothing() -> None:
    model = correlated()
    plain = {path: one.weight.detach().clone() for path, one in model.named_modules() if isinstance(one, nn.Linear)}
    accelpatch.patch(model, recipe("gptq+awq"), verify=False, progress=False)
    smoothed = [one for one in model.modules() if getattr(one, "factors", None) is not None]
    assert len(smoothed) == 7 * len(model.model.layers)
    for path, weight in weights_of(model).items():
        assert float((weight - plain[path]).norm() / plain[path].norm()) < 0.25


def test_smoothing_of_a_given_strength_is_in_what_gptq_rounds() -> None:
    """The norm gives divided values then, and the weight has to be made for these."""
    model = correlated()
    due = logits(model, full_batch())
    asked = replace(recipe("gptq"), calibrate={**TEXT, "alpha": 0.5})
    accelpatch.patch(model, asked, verify=False, progress=False)
    assert sum(getattr(one, "factors", None) is not None for one in model.modules()) == 7 * len(model.model.layers)
    assert logits(model, full_batch()).sub(due).norm() < 0.3 * due.norm()


def test_a_codebook_beside_smoothing_stays_as_it_is() -> None:
    rule = {"name": "linear", "replace": "nf4_weight_only", "options": {"group_size": 32}}
    asked = {"name": "r", "extends": "int4", "rules": [rule], "calibrate": {**TEXT, "alpha": "search"}}
    plan = accelpatch.plan(CAUSAL["llama"].make(), asked)
    assert plan.groups == ()
    assert not plan.calibrates


def test_8_bits_and_the_head() -> None:
    model = correlated()
    accelpatch.patch(model, recipe("gptq", 8), progress=False)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert {site.replacer for site in report.sites if site.role in ("linear", "q_proj", "head")} >= {"int8_weight_only"}


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = correlated()
    accelpatch.patch(model, recipe("gptq+awq"), progress=False, keep_original="none")
    due = logits(model, full_batch())
    model.save_pretrained(tmp_path / "out")
    again = accelpatch.load(str(tmp_path / "out"), progress=False).model
    assert logits(again, full_batch()).equal(due)


def test_the_same_twice() -> None:
    first, second = (accelpatch.patch(correlated(), recipe("gptq"), verify=False, progress=False) for _ in range(2))
    for (path, one), other in zip(weights_of(first).items(), weights_of(second).values(), strict=True):
        assert one.equal(other), path


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = correlated(), list[tuple[str, bool]]()
    due = weights_of(accelpatch.patch(copy.deepcopy(model), recipe("gptq+awq"), verify=False, progress=False))
    plain = Blocks.run

    def killed(self: Blocks, block: str, finish: bool, step: Any) -> None:
        runs.append((block, finish))
        if len(runs) == 3:
            raise KeyboardInterrupt
        plain(self, block, finish, step)

    monkeypatch.setattr(Blocks, "run", killed)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        accelpatch.patch(model, recipe("gptq+awq"), verify=False, progress=False, resume=tmp_path)
    assert snapshot(model) == before
    assert len(list(tmp_path.glob("*.block.safetensors"))) == 1
    accelpatch.patch(model, recipe("gptq+awq"), verify=False, progress=False, resume=tmp_path)
    blocks = [f"model.layers.{place}" for place in range(len(model.model.layers))]
    assert runs[3] == (blocks[0], True)  # its weights were there; its outputs were made anew
    assert runs[4] == (blocks[1], False)
    for path, one in weights_of(model).items():
        assert one.equal(due[path]), path


def test_kept_blocks_of_another_text_are_made_anew(tmp_path: Path) -> None:
    model = correlated()
    accelpatch.patch(copy.deepcopy(model), recipe("gptq"), verify=False, progress=False, resume=tmp_path)
    other = methods.by_method(methods.of_bits(4), "gptq", 4, 64)
    due = weights_of(accelpatch.patch(copy.deepcopy(model), other, verify=False, progress=False))
    got = weights_of(accelpatch.patch(model, other, verify=False, progress=False, resume=tmp_path))
    assert all(one.equal(due[path]) for path, one in got.items())


def test_activations_that_are_not_finite_are_named() -> None:
    model = correlated()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    before = snapshot(model)
    words = r"model\.layers\.1\.self_attn\.q_proj: channel 3 of its input is NaN .*; nothing was changed"
    with pytest.raises(PatchError, match=words):
        accelpatch.patch(
            model, recipe("gptq"), verify=False, progress=False, data=["abcdefgh" * 25], tokenizer=_Bytes()
        )
    assert snapshot(model) == before


class _Bytes:
    """A tokenizer of one token a byte."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        ids = [byte % 60 for byte in text.encode()]
        return {"input_ids": torch.tensor([ids]) if kwargs.get("return_tensors") else ids}


def test_bad_options() -> None:
    rule = {"name": "linear", "replace": "int4_weight_only"}
    for options, words in (
        ({"rounding": "best"}, "rounding is 'best', and it is one of nearest, gptq"),
        ({"act_order": True}, "act_order and damping are options of rounding: gptq"),
        ({"rounding": "gptq", "damping": -1.0}, "damping is -1, and it is above 0"),
    ):
        asked = {"name": "r", "extends": "int4", "rules": [rule | {"options": {"group_size": [32], **options}}]}
        with pytest.raises(PlanError, match=words):
            accelpatch.plan(CAUSAL["llama"].make(), asked)
    with pytest.raises(RecipeError, match="no method is called 'best'; known: rtn, gptq, awq, gptq\\+awq"):
        methods.by_method(recipes.load("int4"), "best")
    with pytest.raises(RecipeError, match="exact has no linear layers that gptq makes"):
        methods.by_method(recipes.load("exact"), "gptq")
    with pytest.raises(RecipeError, match="no recipe has weights of 5 bits; known: 3, 4, 8"):
        methods.of_bits(5)
    with pytest.raises(RecipeError, match="int4 does not calibrate"):
        methods.with_text(recipes.load("int4"), 4, None)


def test_the_bundled_recipes_are_their_methods() -> None:
    for name, method in (("int4-gptq", "gptq"), ("int4-awq", "awq")):
        bundled, made = recipes.load(name), methods.by_method(recipes.load("int4"), method)
        for rule in made.rules:
            other = next(one for one in bundled.rules if one.name == rule.name)
            assert (rule.match, rule.replace, dict(rule.options)) == (other.match, other.replace, dict(other.options))
        assert dict(bundled.calibrate or {}) == dict(made.calibrate or {})
