"""Records in the report which layers decode steps run fused, which run as modules, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from accelpatch.errors import VerifyError
from accelpatch.patching.verify import SiteErrors
from accelpatch.recipe.recipe import Recipe
from accelpatch.report import Report, SiteRecord

Key = TypeVar("Key", int, str)


def layer_records(report: Report, others: Collection[str] = ()) -> dict[int, SiteRecord]:
    """Index of a layer in its model -> its record, for layers whose replacement may be fused. others: paths to leave
    out."""
    found = (record for record in report.sites if record.fused is not None and record.path not in others)
    return {int(record.path.rpartition(".")[2]): record for record in found}


def record_layers(
    records: Mapping[Key, SiteRecord], recipe: Recipe, errors: Mapping[Key, SiteErrors],
    failed: Mapping[Key, str], unfused: Mapping[Key, str],
) -> None:  # fmt: skip
    """Write into the records what runs each layer. All mappings have the same keys: a layer's index or its path.

    errors: of fused layers, in a prompt and in cached steps. failed: the reason for each layer over its bound. unfused:
    the reason for each layer that could not be fused. Raises VerifyError for a failed layer, if the recipe says
    `on_failure: error`.
    """
    for key, found in errors.items():
        record = records[key]
        record.kernel_error, record.kernel_bound, record.steps = found.kernel_error, found.kernel_bound, True
        record.format_error, record.unverified = found.format_error, None
    for key, reason in failed.items():
        records[key].failed = True
        if recipe.verify.on_failure == "error":
            raise VerifyError(f"{records[key].path}: {reason}; nothing was changed")
    reasons = {**unfused, **failed}
    for key, record in records.items():
        record.fused, record.by_modules = key not in reasons, reasons.get(key)
        record.kernel = record.kernel if record.fused else "modules"
