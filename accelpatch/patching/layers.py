"""What a report says of a model's layers: which of them decode steps run fused, which run as modules, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from accelpatch.errors import VerifyError
from accelpatch.patching.verify import SiteErrors
from accelpatch.recipe.recipe import Recipe
from accelpatch.report import Report, SiteRecord

Place = TypeVar("Place", int, str)


def layer_records(report: Report, others: Collection[str] = ()) -> dict[int, SiteRecord]:
    """Index of a layer in its model -> its record, for layers whose replacement can be fused; without the paths of
    `others`."""
    found = (record for record in report.sites if record.fused is not None and record.path not in others)
    return {int(record.path.rpartition(".")[2]): record for record in found}


def record_layers(
    records: Mapping[Place, SiteRecord], recipe: Recipe, errors: Mapping[Place, SiteErrors],
    failed: Mapping[Place, str], unfused: Mapping[Place, str],
) -> None:  # fmt: skip
    """Write into the records what runs each layer, by its index or by its path.

    errors: of fused layers in a prompt and cached steps. failed: why of those over their bound. unfused: why of those
    that could not be fused. Raises VerifyError for a failed layer, if the recipe says `on_failure: error`.
    """
    for place, found in errors.items():
        record = records[place]
        record.kernel_error, record.kernel_bound, record.steps = found.kernel_error, found.kernel_bound, True
        record.format_error, record.unverified = found.format_error, None
    for place, reason in failed.items():
        records[place].failed = True
        if recipe.verify.on_failure == "error":
            raise VerifyError(f"{records[place].path}: {reason}; nothing was changed")
    reasons = {**unfused, **failed}
    for place, record in records.items():
        record.fused, record.by_modules = place not in reasons, reasons.get(place)
        record.kernel = record.kernel if record.fused else "modules"
