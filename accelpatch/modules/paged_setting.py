"""The name of the attention over pages in configurations, and the implementations in whose place it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelpatch.modules.attention_settings import SETTING

# transformers makes no masks for names with "flash"; before 5.24 it puts "paged|" before a name that has it nowhere
PAGED = "accelpatch_flash_paged|pages"
_BEFORE: dict[int, Any] = {}  # id of a configuration that names PAGED -> the implementation before


def implementation(config: Any) -> Any:
    """The implementation that a configuration names; of one that names PAGED, that of before."""
    name = config._attn_implementation
    return _BEFORE.get(id(config)) if name == PAGED else name


def begin(configurations: Mapping[int, Any]) -> None:
    """Let these configurations, by id, name PAGED."""
    for key, config in configurations.items():
        _BEFORE[key] = vars(config)[SETTING]
        vars(config)[SETTING] = PAGED


def end(configurations: Mapping[int, Any]) -> None:
    """Undo `begin`, but for configurations that name another implementation by now."""
    for key, config in configurations.items():
        before = _BEFORE.pop(key, None)
        if vars(config).get(SETTING) == PAGED:
            vars(config)[SETTING] = before
