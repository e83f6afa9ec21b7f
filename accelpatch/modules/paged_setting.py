"""The name of the attention over pages in configurations, and the implementations in whose place it is there.

A copy of a configuration, as of a saved one, names the implementation from before: no manager runs the copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from accelpatch.modules.attention_settings import SETTING

# transformers makes no masks for names with "flash"; before 5.24 it puts "paged|" before a name that has it nowhere
PAGED = "accelpatch_flash_paged|pages"
# id of a configuration that names PAGED -> how many began and have not ended
_BEGUN: Counter[int] = Counter()


class _Named(str):
    """PAGED in a configuration. before: the implementation in whose place it is."""

    before: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.before

    def __reduce__(self) -> Any:
        return _as_it_was, (self.before,)


def _as_it_was(before: Any) -> Any:
    return before


def implementation(config: Any) -> Any:
    """The implementation that a configuration names; of one that names PAGED, that of before."""
    name = config._attn_implementation
    return getattr(name, "before", None) if name == PAGED else name


def begin(configurations: Mapping[int, Any]) -> None:
    """Let these configurations, by id, name PAGED until each `begin` has its `end`."""
    for key, config in configurations.items():
        named = _Named(PAGED)
        named.before = implementation(config)
        _BEGUN[key] += 1
        vars(config)[SETTING] = named


def end(configurations: Mapping[int, Any]) -> None:
    """Undo `begin`, but for configurations that name another implementation by now."""
    for key, config in configurations.items():
        _BEGUN[key] -= 1
        if _BEGUN[key] <= 0:
            del _BEGUN[key]
            if vars(config).get(SETTING) == PAGED:
                vars(config)[SETTING] = implementation(config)
