"""Implementations of a user's own: who takes them, what verification finds, and how they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import accelpatch
from accelpatch.device import KNOWN, probe
from accelpatch.errors import ArgumentError, KernelError, PlanError
from accelpatch.kernels import added, dispatch
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.recipe.recipe import parse
from tests.support import plugins
from tests.support.simulated import greedy
from tests.support.tiny import CAUSAL, padded_batch, snapshot

RECIPE = """
name: mine
description: Linear layers by a user's implementation.
extends: exact
rules:
  - name: product
    match: {role: [linear, head]}
    replace: gemv
    options: {kernel: mine}
verify:
  bounds: {product: 32 u}
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    plugins.forget()


def few(spec: Any, device: Any) -> str | None:
    return None if spec.sizes["M"] <= 8 else f"{spec.sizes['M']} rows are more than 8"


def add(run: Any = None, **given: Any) -> list[int]:
    """Add the implementation `mine`; returns the rows of its calls."""
    calls: list[int] = []

    @accelpatch.implementation("linear", name="mine", why_not=few, **given)
    def mine(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(x[..., 0].numel())
        return (run or functional.linear)(x, w, bias)

    return calls


def test_a_recipe_names_it() -> None:
    calls = add()
    model: Any = CAUSAL["qwen2"].make()  # with biases
    before, due = snapshot(model), greedy(model, padded_batch())
    accelpatch.patch(model, parse(RECIPE))
    report = model.accelpatch.report()
    taken = [site for site in report.sites if site.kernel == "mine"]
    assert len(taken) == 15
    assert all(site.kernel_error is not None for site in taken)
    assert report.verification.failures == []
    assert "a linear layer runs by mine" in str(report), "the layer is not fused, and the report says why"
    calls.clear()
    assert greedy(model, padded_batch()).equal(due)
    assert calls
    assert max(calls) <= 8, "a prompt runs by torch"
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def test_the_table_has_it_for_the_rows_that_it_is_for() -> None:
    """With no word of it in the recipe; and on machines that are not here."""
    add(rows=(1, 4))
    model = CAUSAL["llama"].make(torch.bfloat16)
    for device in (probe("cpu"), KNOWN["gfx942"], KNOWN["sm_90"]):
        plan = accelpatch.plan(model, "exact", device=device)
        assert [entry.choice.kernel for entry in plan.replaced if entry.site.role == "q_proj"] == ["mine"] * 2
        assert "float_linear  1-4 mine  5-" in plan.why()
        assert "1-4 mine:" not in plan.why(), "what was measured of ours is not said of it"
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    dispatch.calls.clear()
    float_linear.float_linear(x, w)
    float_linear.float_linear(x[:, None].expand(4, 2, 8), w)
    assert dispatch.calls == {("float_linear", "mine"): 1, ("float_linear", "torch"): 1}


WRONG = {
    "by a factor": lambda x, w, b: 1.001 * functional.linear(x, w, b),
    "without the tail": lambda x, w, b: functional.linear(x[..., :-1], w[:, :-1], b),
    "one row": lambda x, w, b: functional.linear(x, w, b).index_fill(-1, torch.tensor(3), 0.0),
    "not a number": lambda x, w, b: functional.linear(x, w, b) * float("nan"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kernel_is_found_and_the_site_stays(case: str) -> None:
    add(WRONG[case])
    model: Any = CAUSAL["llama"].make()
    due = greedy(model, padded_batch())
    accelpatch.patch(model, parse(RECIPE))
    report = model.accelpatch.report()
    kept = [site for site in report.sites if site.path.endswith(("_proj", "lm_head"))]
    assert len(kept) == 15
    assert all(site.replacer is None for site in kept)
    assert all("is over the float rule's bound" in str(site.reason) for site in kept)
    assert greedy(model, padded_batch()).equal(due)


def test_another_shape_than_the_operations_is_an_error_and_the_model_is_as_it_came() -> None:
    add(lambda x, w, b: functional.linear(x, w, b)[..., :-1])
    model: Any = CAUSAL["llama"].make()
    before = snapshot(model)
    with pytest.raises(accelpatch.AccelpatchError, match=r"mine returned torch\.float32 \[.*, and float_linear is"):
        accelpatch.patch(model, parse(RECIPE))
    assert snapshot(model) == before


def test_what_cannot_run_here_says_why() -> None:
    accelpatch.implementation("linear", name="mine", why_not=lambda spec, device: f"not on {device.kind}")(
        functional.linear
    )
    sites = accelpatch.plan(CAUSAL["llama"].make(), parse(RECIPE)).report().sites
    assert {site.reason for site in sites if site.role == "q_proj"} == {"mine: not on cpu"}
    with dispatch.forced("mine"), pytest.raises(KernelError, match="'mine' cannot run here: not on cpu"):
        float_linear.float_linear(torch.ones(1, 2), torch.ones(3, 2))


def test_a_recipe_that_does_not_use_it_says_so() -> None:
    add()
    plan = accelpatch.plan(CAUSAL["llama"].make(), "int8")
    assert "no site takes mine: give a rule of the recipe `replace: gemv` and `options: {kernel: mine}`" in str(plan)
    assert "no site takes" not in str(accelpatch.plan(CAUSAL["llama"].make(), parse(RECIPE)))


def test_a_recipe_whose_implementation_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"no implementation of linear is called mine \(added are: none\): "):
        accelpatch.plan(CAUSAL["llama"].make(), parse(RECIPE))


def test_gradients_run_by_torch() -> None:
    calls = add()
    model: Any = CAUSAL["llama"].make()
    accelpatch.patch(model, parse(RECIPE.replace("extends: exact\n", "")))
    calls.clear()
    model(**padded_batch()).logits.sum().backward()
    assert calls == []
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_a_transposed_weight() -> None:
    calls = add()
    model: Any = CAUSAL["gpt2"].make()
    accelpatch.patch(model, parse(RECIPE))
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert sum(site.kernel == "mine" for site in report.sites) >= 8
    assert calls


def test_compiled_programs_see_an_operation() -> None:
    add()
    x, w = torch.randn(2, 8), torch.randn(3, 8)
    compiled = torch.compile(
        lambda x, w: float_linear.float_linear(x, w, None, "mine"), backend="eager", fullgraph=True
    )
    dispatch.calls.clear()
    torch.testing.assert_close(compiled(x, w), functional.linear(x, w))
    assert dispatch.calls["float_linear", "mine"] == 1


@pytest.mark.parametrize(
    ("op", "name", "message"),
    [
        ("conv", "mine", "there is no operation 'conv'; there are linear, float_linear"),
        ("linear", "My-gemv", "use lower-case letters, digits and _"),
        ("linear", "hip", "hip is an implementation of float_linear that accelpatch has"),
        ("linear", "reference", "reference is an implementation"),
        ("decode_step", "mine", "decode_step writes into its arguments"),
    ],
)
def test_names_that_are_refused(op: str, name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        accelpatch.implementation(op, name=name)


def test_a_plugin_brings_it_and_its_files_count(tmp_path: Path) -> None:
    """What verified a saved model is known by the files too: the Python file, the kernel file and its headers."""
    (tmp_path / "kernel.cpp").write_text('#include "more.h"\n')
    (tmp_path / "more.h").write_text("")
    (tmp_path / "plugin.py").write_text(
        "import accelpatch\n"
        "@accelpatch.module('kernel.cpp')\n"
        "def kernel(x): ...\n"
        "@accelpatch.implementation('linear', name='mine')\n"
        "def mine(x, w, bias=None): ...\n"
    )
    assert accelpatch.load_plugin(tmp_path / "plugin.py") == ("mine",)
    files = [file.name for file in added.of("float_linear")["mine"].files()]
    assert files == ["plugin.py", "kernel.cpp", "more.h"]
