"""Why a test that passes stock does not pass on patched models: the first rule that fits its failure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Rule:
    """Fits a failure whose text matches `shows`, by the recipes named (all, where none is)."""

    reason: str
    shows: str
    recipes: tuple[str, ...] = ()


RULES = (
    Rule("ran out of time", r"OutOfTime"),
    Rule(
        "compare the classes of a cache's layers, which have a subclass while steps hold their tokens",
        r"cache_utils\.(\w+)'> != <class 'transformers\.cache_utils\.\1'>",
    ),
    Rule(
        "look for an image's place by embeddings that were taken before the patch",
        r"Image features and image tokens do not match",
        ("int8",),
    ),
    Rule(
        "compare numbers, and int8 rounds",
        r"Tensor-likes are not (close|equal)|allclose|AssertionError: \S+ not less|max\(\)\.item\(\) < 1e-3",
        ("int8",),
    ),
)


def reason_of(record: dict[str, Any], recipe: str) -> str:
    """The reason of a test's record that is not of a passed test."""
    if record["outcome"] == "started":
        return "ended the process"
    if record["outcome"] == "skipped":
        return "skip themselves"
    text = record.get("error", {}).get("text", "")
    fitting = (rule for rule in RULES if recipe in (rule.recipes or (recipe,)) and re.search(rule.shows, text))
    return next((rule.reason for rule in fitting), UNEXPLAINED)
