"""Verification sees what it is for: a kernel that is wrong, a format that is wrong, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import VerifyError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import Int4Rows, Int8Rows
from accelpatch.kernels.spec import Implementation
from accelpatch.patching import verify
from accelpatch.quant import int4, int8
from accelpatch.recipe import recipe as recipes
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, padded_batch, snapshot

PACKED = {
    "int8_linear": ("packed_linear",),
    "int4_linear": ("packed_linear",),
    "int8_embedding": ("packed_embedding",),
}
KERNEL = "over the float rule's bound"


def strict(name: str) -> recipes.Recipe:
    """A bundled recipe under which a site over its bound is an error."""
    found = recipes.load(name)
    return replace(found, verify=replace(found.verify, on_failure="error"))


def sabotage(monkeypatch: pytest.MonkeyPatch, op: str, wrong: Callable[..., Any]) -> None:
    """`wrong(run, *args)` in place of every implementation of `op`, and of the same operation over a CPU pack."""
    for one in (op, *PACKED.get(op, ())):
        kernel = dispatch.kernel(one)
        for name, real in list(kernel.implementations.items()):
            broken = Implementation(partial(wrong, real.run), real.why_not)
            monkeypatch.setitem(kernel.implementations, name, broken)


def drops_the_tail_of_k(run: Any, x: Tensor, q: Tensor, *rest: Any) -> Tensor:
    x = x.clone()
    x[..., -2:] = 0
    return run(x, q, *rest)


def forgets_the_bias(run: Any, x: Tensor, *rest: Any) -> Tensor:
    return run(x, *(None if isinstance(a, Tensor) and a.is_floating_point() and a.dim() == 1 else a for a in rest))


def one_row_only(run: Any, x: Tensor, *rest: Any) -> Tensor:
    y = run(x, *rest)
    flat = y.view(-1, y.shape[-1])
    flat[1:] += 1e-3 * flat[1:].abs().max() if len(flat) > 1 else 0
    return y


def wrong_row(run: Any, ids: Tensor, *rest: Any) -> Tensor:
    return run((ids - 1).clamp(min=0), *rest)


def nan_where_none_is(run: Any, *args: Any) -> Any:
    result = run(*args)
    (result if isinstance(result, Tensor) else result[0]).view(-1)[0] = float("nan")
    return result


def half_precision(run: Any, *args: Any) -> Any:
    """Computes in bfloat16 what is to be float32: an error far under any format's bound."""
    low = [a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    result = run(*low)
    wide = (torch.float32,)
    return result.to(*wide) if isinstance(result, Tensor) else tuple(part.to(*wide) for part in result)


# op, what goes wrong, recipe, model, the sites that it must be found at
SABOTAGES: dict[str, tuple[str, Callable[..., Any], str, str, str]] = {
    "int8-tail": ("int8_linear", drops_the_tail_of_k, "int8", "llama", "linear head"),
    "int4-tail": ("int4_linear", drops_the_tail_of_k, "int4", "llama", "linear head"),
    "int8-bias": ("int8_linear", forgets_the_bias, "int8", "gpt2", "linear"),
    "int8-many-rows": ("int8_linear", one_row_only, "int8", "llama", "linear head"),
    "embedding-row": ("int8_embedding", wrong_row, "int8", "llama", "head"),
    "int8-nan": ("int8_linear", nan_where_none_is, "int8", "llama", "linear head"),
    "norm-nan": ("rmsnorm", nan_where_none_is, "exact", "llama", "norm"),
    "norm-precision": ("rmsnorm", half_precision, "int8", "llama", "norm"),
    "add-norm-precision": ("add_rmsnorm", half_precision, "int4", "gemma2", "layer"),
    "int8-precision": ("int8_linear", half_precision, "int8", "llama", "linear head"),
    "mlp-precision": ("gated_activation", half_precision, "exact", "llama", "mlp"),
    "rotary-precision": ("rotary_cos_sin", lambda run, ids, freq, scaling, dtype: tuple(
        part.bfloat16().to(dtype) for part in run(ids, freq, scaling, dtype)), "exact", "llama", "rotary"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c, marks=[pytest.mark.smoke] if c == "int8-tail" else []) for c in SABOTAGES]
)
def test_a_wrong_kernel_is_found_and_its_sites_stay(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, wrong, recipe, name, roles = SABOTAGES[case]
    model = CAUSAL[name].make()
    before, expected = snapshot(model), logits(model, padded_batch())
    plan = accelpatch.plan(model, recipe)
    due = {entry.site.path for entry in plan.replaced if entry.site.roles & set(roles.split())}
    assert due
    sabotage(monkeypatch, op, wrong)
    with pytest.raises(VerifyError, match="nothing was changed") as caught:
        accelpatch.patch(model, strict(recipe))
    assert any(str(caught.value).startswith(f"{path}: ") for path in due)
    assert snapshot(model) == before
    accelpatch.patch(model, recipe)
    report = model.accelpatch.report()
    failed = {site.path: site.reason for site in report.sites if site.failed}
    assert due <= set(failed)
    assert all(KERNEL in failed[path] for path in due)
    assert len(report.verification.failures) == len(failed)
    assert report.replaced == len(plan.replaced) - len(failed)
    by_path = dict(model.named_modules())
    assert all(type(by_path[path]).__module__.startswith(("transformers", "torch")) for path in failed)
    accelpatch.unpatch(model)
    monkeypatch.undo()
    assert snapshot(model) == before
    assert logits(model, padded_batch()).equal(expected)


def wrong_scale(weight: Int8Rows | Int4Rows) -> Int8Rows | Int4Rows:
    scale = weight.scale.clone()
    scale[0] *= 3  # one row of many
    return weight.replace(scale=scale)


def swapped_rows(weight: Int8Rows | Int4Rows) -> Int8Rows | Int4Rows:
    return weight.replace(w=weight.w.roll(1, 0))


@pytest.mark.parametrize("spoil", [pytest.param(wrong_scale, id="scale"), pytest.param(swapped_rows, id="rows")])
@pytest.mark.parametrize("form, recipe", [pytest.param(int8, "int8", id="int8"), pytest.param(int4, "int4", id="int4")])
def test_a_wrong_format_is_found(
    form: Any, recipe: str, spoil: Callable[[Int8Rows | Int4Rows], Int8Rows | Int4Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is right for what it is given, so only the comparison with the original can see this."""
    model = CAUSAL["mistral"].make()
    before = snapshot(model)
    quantize = form.quantize
    monkeypatch.setattr(form, "quantize", lambda weight, **options: spoil(quantize(weight, **options)))
    with pytest.raises(VerifyError, match=r"format error .* is over the recipe's bound"):
        accelpatch.patch(model, strict(recipe))
    assert snapshot(model) == before
    accelpatch.patch(model, recipe)
    failed = {site.path: site.reason for site in model.accelpatch.report().sites if site.failed}
    assert {"model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"} <= set(failed)
    assert all("format error" in reason for reason in failed.values())


def test_bounds_by_rule_name() -> None:
    model = CAUSAL["llama"].make()
    text = (
        "name: t\ndescription: t\nrules:\n"
        "  - {name: mlps, match: {role: [gate_proj, up_proj]}, replace: int8_weight_only}\n"
        "  - {name: rest, match: {role: linear}, replace: int8_weight_only}\n"
        "verify: {bound: 0.05, bounds: {mlps: 2.0e-7}}\n"
    )
    accelpatch.patch(model, recipes.parse(text))
    sites = {site.path: site.failed for site in model.accelpatch.report().sites if site.role.endswith("_proj")}
    assert sites == {path: path.endswith(("gate_proj", "up_proj")) for path in sites}


@pytest.mark.parametrize("metric", ["relative_rmse", "max_abs", "cosine"])
def test_every_metric_is_measured(metric: str) -> None:
    model = CAUSAL["llama"].make()
    found = recipes.load("int8")
    accelpatch.patch(model, replace(found, verify=replace(found.verify, metric=metric, bound=10.0, bounds={})))
    errors = [s.format_error for s in model.accelpatch.report().sites if s.replacer == "int8_weight_only"]
    assert all(0 < error < 0.2 for error in errors)


@pytest.mark.parametrize("metric", list(verify.METRICS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_is_not_finite_must_be_so_in_both(metric: str, bad: float) -> None:
    fine, spoilt = torch.tensor([3.0, 1.0, 2.0, 0.5]), torch.tensor([3.0, bad, 2.0, 0.5])
    near = fine + torch.tensor([0.1, 0.0, 0.0, 0.0])
    without = verify.format_error(metric, [(near[[0, 2, 3]], fine[[0, 2, 3]])])
    assert 0 < without < 0.2
    assert verify.format_error(metric, [(near, spoilt)]) == float("inf")
    assert verify.format_error(metric, [(spoilt, fine)]) == float("inf")
    assert verify.format_error(metric, [(near.where(fine != 1, bad), spoilt)]) == pytest.approx(without)
    nothing = torch.full((3,), bad)
    assert verify.format_error(metric, [(nothing, nothing)]) == 0
    assert verify.format_error(metric, [(torch.zeros(3), torch.zeros(3))]) == 0
    assert verify.format_error(metric, []) == 0


def test_figures_of_the_report() -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int4")
    report = model.accelpatch.report()
    taken = [site for site in report.sites if site.replacer is not None]
    assert all(site.kernel_error is not None and site.kernel_share <= 1 for site in taken)
    int4_errors = [site.format_error for site in taken if site.replacer == "int4_weight_only"]
    assert all(0.01 < error < 0.2 for error in int4_errors)
    exact = [site.format_error for site in taken if site.replacer in ("rmsnorm", "rotary_embedding", "gated_mlp")]
    assert all(error <= 1e-6 for error in exact)
    whole = report.verification
    assert whole.worst_format_error == max(site.format_error for site in taken)
    assert whole.worst_kernel_error == max(site.kernel_share for site in taken if not site.steps)
    assert whole.worst_fused_error == max(site.kernel_share for site in taken if site.steps)
    assert whole.fused_layers == 2
    assert whole.kl > 1e-4
    assert 0 < whole.top1 <= 1
    assert whole.tokens == 1 + 12 + 2 * 12 + 6
    assert {"capture", "build and verify", "check"} <= set(report.seconds)


def test_nothing_is_run_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CAUSAL["llama"].make()
    runs: list[nn.Module] = []
    handle = model.register_forward_pre_hook(lambda module, args: runs.append(module))
    accelpatch.patch(model, "int8", verify=False)
    assert runs == []
    report = model.accelpatch.report()
    assert report.verification is None
    assert {s.unverified for s in report.sites if s.replacer} == {"verification was switched off"}
    handle.remove()
    accelpatch.unpatch(model)
