"""Tiny models whose weights are packed, in every format, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.quant import fp8, int4, int8
from accelpatch.quant.formats import dequantize
from accelpatch.recipe.recipe import parse
from tests.support.tiny import CAUSAL

_FP8 = parse(
    "name: fp8\ndescription: fp8\nextends: exact\nrules:\n  - match: {role: linear}\n    replace: fp8_weight_only\n"
    "verify: {bound: 0.1}\n"
)


def _patch(recipe: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: accelpatch.patch(model, recipe, verify=False, **options)


# format -> what patches a model; `compact` is planned for a GPU and run by torch's operations
PATCHES: dict[str, Callable[[Any], Any]] = {
    "int8": _patch("int8"),
    "int4": _patch("int4"),
    "fp8": _patch(_FP8),
    "compact": _patch("compact", device=KNOWN["sm_90"]),
}


FORMS = ("exact", *PATCHES)


def patch(model: Any, form: str) -> Any:
    """The model, patched to hold its weights in a format; as they are for `exact`."""
    return accelpatch.patch(model, "exact", verify=False) if form == "exact" else PATCHES[form](model)


def replacements(model: nn.Module) -> list[str]:
    """Names of the modules that are replacements."""
    return [name for name, module in model.named_modules() if hasattr(type(module), "replaced_class")]


def plain(name: str = "llama", form: str = "int8", **changes: Any) -> Any:
    """An unpatched model in a dtype that the format takes."""
    return CAUSAL[name].make(torch.bfloat16 if form == "compact" else torch.float32, **changes)


def packed(name: str = "llama", form: str = "int8", **changes: Any) -> Any:
    """The same model, patched."""
    return PATCHES[form](plain(name, form, **changes))


def rounded(module: Any, weight: Tensor) -> Tensor:
    """What a packed module holds once a float weight in its original's shape was written into it.

    By the bundled recipes: int8 and int4 have groups of 64 where K allows it, and of 32 elsewhere.
    """
    full = (weight.t() if module.transposed else weight).detach()
    kind, dtype, numbers = type(module).__name__[:4], weight.dtype, full
    group = 32 if full.shape[1] % 64 else 64
    if kind == "Int8":
        numbers = dequantize(int8.quantize(full, group_size=group), dtype)
    elif kind == "Int4":
        numbers = dequantize(int4.quantize(full, group_size=group), dtype)
    elif kind == "Fp8W":
        numbers = dequantize(fp8.quantize(full), dtype)
    else:
        assert kind == "Comp"  # nothing is rounded
    return numbers.t() if module.transposed else numbers
