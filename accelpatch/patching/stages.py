"""The stages of a patch from plan to swap: capture inputs, build and verify each site; and verify the whole model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import FOREIGN, RecipeError, VerifyError
from accelpatch.patching.apply import Built, build_placed, naming
from accelpatch.patching.capture import Call, recording, run
from accelpatch.patching.entry import Entry
from accelpatch.patching.extent import Extent, first_of_kind, is_layer
from accelpatch.patching.groups import with_groups
from accelpatch.patching.plan import Plan
from accelpatch.patching.request import Request
from accelpatch.patching.stored import FORMAT_BOUND
from accelpatch.patching.verify import UNITS, Checking, SiteErrors, compare_logits, site_errors
from accelpatch.progress import Progress, Reports
from accelpatch.recipe.recipe import Recipe
from accelpatch.recipe.schema import Bound, Units
from accelpatch.report import Report, Verification

Samples = Sequence[Mapping[str, Any]]
DEVICE_LOST = getattr(torch, "AcceleratorError", ())  # a failed device does not mean that the inputs are wrong


@dataclass(eq=False)
class Checked:
    """A replacement with its measured errors, or the reason why there are none."""

    built: Built
    errors: SiteErrors | None
    unverified: str | None


@dataclass(eq=False)
class Captured:
    """The original's outputs on `samples` and the recorded calls of each site (path -> calls), or the reason for none.

    missing: that reason. wanted: whether verification is on, so that the report mentions the reason. own: whether the
    samples are our own, and not the user's.
    """

    samples: Samples = ()
    outputs: Sequence[Any] = ()
    calls: dict[str, list[Call]] = field(default_factory=dict)
    missing: str | None = None
    wanted: bool = False
    own: bool = True


NOT_VERIFIED = Captured(missing="verification was switched off")


def capture(model: nn.Module, request: Request, candidates: Callable[[nn.Module], list[Any]]) -> Captured:
    """Run the original on sample inputs and record every call of the sites that are verified.

    candidates: makes lists of samples, for use if the user gave none; the first list that the model accepts is used. If
    it accepts none, nothing can be verified: a warning, or VerifyError if the recipe says `on_failure: error`.
    """
    plan, progress, first = request.planned, request.watch, first_of_kind(request.planned)
    watched = [
        entry
        for entry in plan.replaced
        if request.extent.every_site or first[entry.site.path] == entry.site.path or is_layer(entry)
    ]
    if request.inputs is not None:
        return replace(_recorded(model, watched, list(request.inputs), progress), own=False)
    refusals, reports = list[str](), Reports(progress)
    for samples in candidates(model):
        try:
            return _recorded(model, watched, samples, reports)
        except FOREIGN as error:  # out-of-memory errors have become PatchErrors here
            if reports.broken or isinstance(error, DEVICE_LOST):
                raise
            refusals.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    why = f"it refuses those made for it ({refusals[0]})" if refusals else "none can be made from its configuration"
    reason = f"no inputs for {type(model).__name__}: {why}"
    if plan.recipe.verify.on_failure == "error":
        raise VerifyError(f"{reason}; nothing was changed. Give some: accelpatch.patch(model, recipe, inputs=[...])")
    more = "give some: accelpatch.patch(model, recipe, inputs=[...])"
    warnings.warn(f"nothing is verified, {reason}; {more}", stacklevel=4)
    return Captured(missing=reason, wanted=True)


def _recorded(model: nn.Module, entries: Sequence[Entry], samples: Samples, progress: Progress) -> Captured:
    members = [member for entry in entries for member in (entry.site, *entry.site.tied)]
    watched = {member.path: model.get_submodule(member.path) for member in members}
    with naming(type(model).__name__, "it ran on the sample inputs"), recording(watched) as calls:
        outputs = run(model, samples, lambda done, total: progress("capture", done, total))
    return Captured(samples, outputs, calls)


def verified_build(
    request: Request, captured: Captured, checking: Checking, stats: Mapping[str, Any]
) -> tuple[list[Checked], Plan]:
    """Build every replacement and compare it with its original; the model is not changed.

    stats: path -> SiteStatistics for Replacer.build. Without captured calls nothing is verified.

    Returns the replacements within their bounds, and the plan with all others marked as kept. Raises VerifyError for
    the first one over its bound if the recipe says so.
    """
    plan, extent = request.planned, request.extent
    if captured.missing is None:
        check_bounds(plan)
    accepted, kinds, numbers = list[Checked](), first_of_kind(plan), Counter[str]()
    failed, final = dict[str, str](), dict[str, Entry]()
    for done, entry in enumerate(plan.replaced):
        path = entry.site.path
        built = request.loaded.get(path) or build_placed(entry, request.placement, stats.get(path))
        with naming(path, "its replacement was verified"):
            number = numbers[kinds[path]] if kinds[path] not in failed else 0
            checked = _check(built, plan.recipe, captured, checking, stats.get(path), extent, number)
        if not extent.every_site:
            checked = _first_only(checked, kinds[path], path in request.loaded)
        final[path], numbers[kinds[path]] = built.entry, numbers[kinds[path]] + 1
        problem = _problem(checked, request, kinds[path] if kinds[path] in failed else None)
        if problem is None:
            accepted.append(checked)
        elif plan.recipe.verify.on_failure == "error":
            raise VerifyError(f"{path}: {problem}; nothing was changed")
        else:
            failed[path] = problem
        if not is_layer(built.entry):  # the check of the fused layer needs a layer's calls again
            for member in (built.entry.site, *built.entry.site.tied):
                captured.calls.pop(member.path, None)
        request.watch("build and verify", done + 1, len(plan.replaced))
    entries = tuple(final.get(entry.site.path, entry) for entry in plan.entries)
    failed = with_groups(failed, plan.groups)
    accepted = [checked for checked in accepted if checked.built.entry.site.path not in failed]
    return accepted, replace(plan, entries=entries).without(failed)


def _problem(checked: Checked, request: Request, failed: str | None) -> str | None:
    """Why a replacement is rejected, or None. failed: path of the first of its kind, if that one was rejected."""
    reason = None if failed is None else f"it is of the kind of {failed}, which is over its bound"
    if checked.errors is not None:
        reason = over_bound(checked.errors, request.planned.recipe, checked.built.entry)
    return request.placement.agreed(reason)


def _first_only(checked: Checked, first: str, loaded: bool) -> Checked:
    """The record of a site when only the first of each kind is checked. first: path of the first of this site's kind.
    loaded: whether loading built its replacement; the original is gone then, so that the error of the weight, if it was
    measured, is recorded as the format error."""
    if checked.errors is not None:
        error = checked.built.weight_error if loaded else checked.errors.format_error
        return replace(checked, errors=replace(checked.errors, format_error=error))
    if checked.unverified is None or checked.built.entry.site.path == first:
        return checked
    return replace(checked, unverified=f"its kernel is that of {first}")


def _check(
    built: Built, recipe: Recipe, captured: Captured, checking: Checking, stats: Any, extent: Extent, number: int
) -> Checked:  # fmt: skip
    """Compare a site's replacements (its own and those of tied modules) with the captured calls.

    number: the site's number among those of its kind; 0 for one that is checked as fully as the first of them.
    """
    if captured.missing is not None:
        return Checked(built, None, captured.missing)
    calls, first = captured.calls, number == 0
    worst: SiteErrors | None = None
    for member, (_, new, _) in zip((built.entry.site, *built.entry.site.tied), built.modules, strict=True):
        if (found := calls.get(member.path)) and (first or extent.every_site):
            one_each = len(found) == len(captured.samples)
            checked = extent.chosen(found, first, captured.own and one_each)
            checked = checked if stats is None else [_smoothed(call, stats) for call in checked]
            replacer = built.entry.replacer
            by_token = replacer is not None and replacer.by_token
            skips_padding = one_each and (by_token or (replacer is not None and replacer.whole))
            samples = extent.chosen(captured.samples, first, captured.own and one_each)
            masks = [_mask(sample) for sample in samples] if skips_padding else []
            units, part = isinstance(bound_of(recipe, built.entry), Units), extent.checked_part(first, number)
            errors = site_errors(new, checked, recipe.verify.metric, checking, masks, by_token, units, part)
            worst = errors if worst is None else worst.worse(errors)
    return Checked(built, worst, None if worst else "no input reached it")


def _smoothed(call: Call, stats: Any) -> Call:
    """An original's call with its input and outputs divided as smoothing divides its replacement's."""
    args = (stats.smoothed_input(call.args[0]), *call.args[1:]) if call.args else ()
    kwargs = call.kwargs if call.args else {name: stats.smoothed_input(value) for name, value in call.kwargs.items()}
    return Call(args, kwargs, tuple(stats.smoothed_output(output) for output in call.outputs))


def over_bound(errors: SiteErrors, recipe: Recipe, entry: Entry) -> str | None:
    """Why a replacement fails verification, or None. The float rule always applies; the other bound is the recipe's."""
    error, allowed = errors.kernel_error, errors.kernel_bound
    if error is not None and allowed is not None and not error <= allowed:
        return f"kernel error {error:.2e} is over the float rule's bound {allowed:.2e}"
    bound = bound_of(recipe, entry)
    if isinstance(bound, Units):
        if errors.units <= bound.count:
            return None
        return f"it is {errors.units:.3g} units of its dtype's precision from the original, and the bound is {bound}"
    if errors.format_error is not None and not errors.format_error <= bound:
        return f"format error {errors.format_error:.3g} ({recipe.verify.metric}) is over the recipe's bound {bound:g}"
    return None


def over_weight_bound(built: Built, recipe: Recipe) -> str | None:
    """Why a replacement that loading built is over its bound, judged by `weight_error`, or None. Raises VerifyError if
    the recipe says so.

    For uncorrelated inputs the relative RMSE of the outputs equals that of the weight.
    """
    error, bound = built.weight_error, bound_of(recipe, built.entry)
    if error is None or recipe.verify.metric != "relative_rmse" or isinstance(bound, Units) or error <= bound:
        return None
    problem = f"its weight is {error:.3g} (relative_rmse) from the original, over the recipe's bound {bound:g}"
    if recipe.verify.on_failure == "error":
        raise VerifyError(f"{built.entry.site.path}: {problem}; nothing was changed")
    return problem


def bound_of(recipe: Recipe, entry: Entry) -> Bound:
    """The recipe's bound on the difference between a site's replacement and its original."""
    if entry.as_stored and isinstance(recipe.verify.of(entry.rule.name if entry.rule else None, True), Units):
        return FORMAT_BOUND  # the original library's kernel may round activations, or the weight to 16 bits
    return recipe.verify.of(entry.rule.name if entry.rule else None, entry.replacer is None or entry.replacer.rounds)


def check_bounds(plan: Plan) -> None:
    """Raise RecipeError for a bound below the precision of a site's dtype."""
    if plan.recipe.verify.metric != "relative_rmse":
        return
    for entry in plan.replaced:
        bound, unit = bound_of(plan.recipe, entry), UNITS.get(getattr(torch, entry.site.dtype, torch.float32))
        if unit and not isinstance(bound, Units) and bound < unit / 2:
            raise RecipeError(
                f"verify: a bound of {bound:g} on {entry.site.path} is below the precision of {entry.site.dtype}, "
                f"a relative RMSE of {unit / 2:.2g}; give at least that, or units of the precision, such as 2 u",
                source=plan.recipe.source,
            )


def stage_report(plan: Plan, built: Sequence[Checked], paths: Mapping[str, int]) -> Report:
    """The plan's report with each site's measured errors. paths: the counter of execution paths in the runtime."""
    report = plan.report()
    report.paths = paths
    records = {record.path: record for record in report.sites}
    for checked in built:
        record = records[checked.built.entry.site.path]
        record.unverified = checked.unverified
        if checked.errors:
            record.kernel_error, record.kernel_bound = checked.errors.kernel_error, checked.errors.kernel_bound
            record.format_error = checked.errors.format_error
    return report


def whole_model(model: nn.Module, captured: Captured, report: Report, request: Request) -> Verification | None:
    """Run the patched model on the samples and compare its next-token logits with the original's.

    Returns None, with a note in the report, where there are no samples.
    """
    if captured.missing is not None:
        if captured.wanted:
            report.notes.append(f"nothing is verified: {captured.missing}")
        return None
    result, extent = Verification(), request.extent
    if extent.whole_model:
        with naming(type(model).__name__, "the patched model was compared with the original"):
            after = run(model, captured.samples, lambda done, total: request.watch("check", done, total))
            result = compare_logits(captured.outputs, after, [_mask(sample) for sample in captured.samples])
    kernel = [site.kernel_share for site in report.sites if site.kernel_share is not None and not site.steps]
    steps = [site.kernel_share for site in report.sites if site.kernel_share is not None and site.steps]
    form = [site.format_error for site in report.sites if site.format_error is not None]
    result.worst_kernel_error, result.worst_format_error = max(kernel, default=None), max(form, default=None)
    result.extent = extent.level
    unchecked = sum(bool(site.fused) and not site.steps for site in report.sites)
    if unchecked and extent.every_layer:
        report.notes.append(f"{unchecked} fused layers are not verified: no sample that steps can run reached them")
    result.fused_layers, result.worst_fused_error = len(steps), max(steps, default=None)
    result.failures = [f"{site.path}: {site.reason or site.by_modules}" for site in report.sites if site.failed]
    return result


def _mask(sample: Mapping[str, Any]) -> Tensor | None:
    mask = sample.get("attention_mask")
    return mask if isinstance(mask, Tensor) else None
