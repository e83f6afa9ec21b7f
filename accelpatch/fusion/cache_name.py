"""What transformers calls the KV cache in arguments and outputs: `cache` since 5.24, `past_key_values` before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

from accelpatch.models.family import family_of_layer

FORMER = "past_key_values"
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else FORMER


CHECK = deprecate_kwarg(FORMER, "0")(lambda: None).__code__  # of every function that deprecate_kwarg decorates


def behind_checks(stock: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` behind the checks of former names that transformers has in front of `stock`, whose place it takes.

    They warn and rename, as they would have before `stock`, which sees new names alone by then. transformers keeps the
    version in the text of the warning to each check, so that a check is copied, with the function that it calls
    exchanged, and not made anew.
    """
    checks, layer = [], stock
    while layer is not None:
        checks += [layer] if getattr(layer, "__code__", None) is CHECK else []
        layer = getattr(layer, "__wrapped__", None)
    for check in reversed(checks):
        cells = [CellType(function) if one.cell_contents is check.__wrapped__ else one for one in check.__closure__]
        function = FunctionType(CHECK, check.__globals__, check.__name__, None, tuple(cells))
    return functools.update_wrapper(function, stock)


def layer_argument(layer: Any) -> str:
    """The name of a decoder layer's argument for the KV cache."""
    family = family_of_layer(layer)
    return CACHE if family is None or family.layer is None else family.layer.cache or CACHE
