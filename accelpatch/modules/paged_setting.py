"""The name of the attention over pages in configurations, and the implementations in whose place it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelpatch.modules.attention_settings import SETTING

# transformers makes no masks for names with "flash"; before 5.24 it puts "paged|" before a name that has it nowhere
PAGED = "accelpatch_flash_paged|pages"
# id of a configuration that names PAGED -> the implementation before, and how many began and have not ended
_BEFORE: dict[int, tuple[Any, int]] = {}


def implementation(config: Any) -> Any:
    """The implementation that a configuration names; of one that names PAGED, that of before."""
    name = config._attn_implementation
    return _BEFORE.get(id(config), (None, 0))[0] if name == PAGED else name


def begin(configurations: Mapping[int, Any]) -> None:
    """Let these configurations, by id, name PAGED until each `begin` has its `end`."""
    for key, config in configurations.items():
        _BEFORE[key] = implementation(config), _BEFORE.get(key, (None, 0))[1] + 1
        vars(config)[SETTING] = PAGED


def end(configurations: Mapping[int, Any]) -> None:
    """Undo `begin`, but for configurations that name another implementation by now."""
    for key, config in configurations.items():
        before, count = _BEFORE.pop(key, (None, 1))
        if count > 1:
            _BEFORE[key] = before, count - 1
        elif vars(config).get(SETTING) == PAGED:
            vars(config)[SETTING] = before
