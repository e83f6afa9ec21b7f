"""The stage of a patch that verifies the fused layers and writes into the report what runs each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelpatch.errors import VerifyError
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.native_model import NativeModel
from accelpatch.fusion.verified import check_layers, over_bound
from accelpatch.patching.plan import Plan
from accelpatch.patching.stages import Captured
from accelpatch.report import Report, SiteRecord


def verified_layers(
    model: Any, plan: Plan, fused: FusedModel | NativeModel | str, captured: Captured, report: Report,
    progress: Callable[[str, int, int], None],
) -> dict[int, str]:  # fmt: skip
    """Check every fused layer on the captured inputs; returns place -> why, of those that are over their bound.

    fused: the fused layers of the patched model, or why there are none. The report's layers get their errors, and the
    reason where modules run. Raises VerifyError for a layer over its bound, if the recipe says `on_failure: error`.
    """
    records = {_place(record): record for record in report.sites if record.fused is not None}
    unfused: dict[int, str] = {}
    if isinstance(fused, str):
        unfused = dict.fromkeys(records, fused.removeprefix("layer 0: "))
    else:
        unfused.update(fused.unfused)
    failed: dict[int, str] = {}
    if not isinstance(fused, str) and captured.missing is None:
        calls = {place: captured.calls.get(record.path, []) for place, record in records.items()}
        found = check_layers(
            model, fused, calls, captured.samples, plan.recipe.verify.metric,
            lambda done, total: progress("verify fused", done, total),
        )  # fmt: skip
        for place, errors in found.items():
            record = records[place]
            record.kernel_error, record.kernel_bound, record.steps = errors.kernel_error, errors.kernel_bound, True
            record.format_error = errors.format_error
            if problem := over_bound(errors):
                failed[place] = problem
    for place, reason in failed.items():
        if plan.recipe.verify.on_failure == "error":
            raise VerifyError(f"{records[place].path}: {reason}; nothing was changed")
        records[place].failed = True
    for place, reason in {**unfused, **failed}.items():
        if place in records:
            records[place].fused, records[place].by_modules = False, reason
    captured.calls.clear()
    return failed


def _place(layer: SiteRecord) -> int:
    """The index of a layer among those of its model."""
    return int(layer.path.rpartition(".")[2])
