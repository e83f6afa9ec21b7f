"""What a deep copy of a runtime starts with."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any


def recounted(made: Any, paths: Counter[str], memo: dict[int, Any]) -> Any:
    """The copy `made` of a runtime with a zeroed copy of `paths`, the one that the copied report shows."""
    made.paths = copy.deepcopy(paths, memo)
    made.paths.clear()
    return made
