"""What the records of a run come to: counts, and failures by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .reasons import reason_of

HEAD = "| family | recipe | passed stock | sites replaced | passed patched | with sites | cannot be met, and why |"


@dataclass(frozen=True)
class Row:
    """A family with a recipe. touched: passed tests in which modules were replaced. reasons: reason -> tests."""

    family: str
    recipe: str
    stock: int
    sites: int
    passed: int
    touched: int
    reasons: dict[str, list[str]]
    records: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def row_of(family: str, recipe: str, stock: int, records: list[dict[str, Any]]) -> Row:
    """The line of a run of the tests that pass stock."""
    passed = [one for one in records if one["outcome"] == "passed"]
    reasons: dict[str, list[str]] = {}
    for one in records:
        if one["outcome"] != "passed":
            reasons.setdefault(reason_of(one, recipe), []).append(one["test"].rpartition("::")[2])
    sites, touched = sum(one.get("sites", 0) for one in records), sum(one.get("sites", 0) > 0 for one in passed)
    return Row(family, recipe, stock, sites, len(passed), touched, reasons, records)


def table(rows: Sequence[Row]) -> str:
    """The lines as a table of Markdown."""
    lines = [HEAD, "| --- " * HEAD.count(" | ") + "| --- |"]
    for row in rows:
        why = Counter({reason: len(tests) for reason, tests in row.reasons.items()}).most_common()
        cells = [row.family, f"`{row.recipe}`", row.stock, row.sites, row.passed, row.touched]
        cells.append("; ".join(f"{count} {reason}" for reason, count in why))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def rows_in(results: dict[str, Any]) -> list[Row]:
    """The lines of a run that was written as JSON, grouped anew."""
    return [row_of(one["family"], one["recipe"], one["stock"], one["records"]) for one in results["rows"]]
