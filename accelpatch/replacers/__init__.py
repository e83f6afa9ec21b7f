"""The registry of replacers: a literal table, and the decorator that adds a user's own.

To add one to accelpatch: docs/contributing/add-a-replacer.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from accelpatch.errors import PlanError
from accelpatch.fusion.layer_replacer import FusedLayerReplacer
from accelpatch.patching.replacer import Replacer
from accelpatch.replacers import experts, weight_only
from accelpatch.replacers.attention import FlashAttentionReplacer
from accelpatch.replacers.compact import Compact
from accelpatch.replacers.experts import FloatExpertsReplacer
from accelpatch.replacers.fp8 import Fp8Blocks, Fp8WeightOnly, W8A8Fp8
from accelpatch.replacers.gated_mlp import GatedMLPReplacer
from accelpatch.replacers.gemv import Gemv
from accelpatch.replacers.gguf import AsStored, GgufBlocks
from accelpatch.replacers.int8_opt import Int8OPT
from accelpatch.replacers.norm import LayerNormReplacer, RMSNormReplacer
from accelpatch.replacers.rotary import RotaryReplacer
from accelpatch.replacers.w8a8 import W8A8

BUILT_IN: tuple[type[Replacer], ...] = (
    *weight_only.FORMATS,
    Fp8Blocks,
    Fp8WeightOnly,
    W8A8,
    W8A8Fp8,
    Int8OPT,
    GgufBlocks,
    AsStored,
    Gemv,
    Compact,
    RMSNormReplacer,
    LayerNormReplacer,
    FusedLayerReplacer,
    RotaryReplacer,
    GatedMLPReplacer,
    FlashAttentionReplacer,
    FloatExpertsReplacer,
    *experts.FORMATS,
)
_registry: dict[str, Replacer] = {cls.name: cls() for cls in BUILT_IN}
for _one in _registry.values():
    _one.stands_for_code = True

AnyReplacer = TypeVar("AnyReplacer", bound=type[Replacer])


def registry() -> Mapping[str, Replacer]:
    """Every registered replacer by the name that recipes use."""
    return MappingProxyType(_registry)


def replacer(cls: AnyReplacer) -> AnyReplacer:
    """Class decorator: register a Replacer subclass under its `name` for this process, replacing one of the same name.

    Raises PlanError for a class that is no Replacer, a name that is not valid in recipes, and a built-in's name.
    """
    name = getattr(cls, "name", None)
    if not (isinstance(cls, type) and issubclass(cls, Replacer)):
        raise PlanError(f"{cls!r} is no subclass of accelpatch.Replacer; derive it and give it a name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name == "keep":
        raise PlanError(f"{cls.__name__}.name is {name!r}; a replacer's name is lower case letters, digits and _")
    if any(name == built_in.name for built_in in BUILT_IN):
        raise PlanError(f"{name} is a replacer of accelpatch; give {cls.__name__} another name")
    _registry[name] = cls()
    return cls
