"""The rotary embedding's cosines and sines as one operation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Spec
from accelpatch.models.family import STATIC_ROPE, family_of_class
from accelpatch.modules.replacement import adopt
from accelpatch.modules.rotary import FusedRotaryEmbedding
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.replacers.proposing import KernelReplacer

_SIGNATURES = (["self", "x", "position_ids"], ["self", "x", "position_ids", "layer_type"])


class RotaryReplacer(KernelReplacer):
    """Rotary embeddings of transformers' form whose frequencies do not depend on the length of the text."""

    name = "rotary_embedding"
    rounds = False

    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        module = site.original
        family = family_of_class(module, "RotaryEmbedding")
        if family is None or family.rotary is None or family.rotary.tables:
            return Reason(f"{type(module).__name__} is not known to make its tables in this form")
        if list(inspect.signature(type(module).forward).parameters) not in _SIGNATURES:
            return Reason(f"{type(module).__name__} takes other arguments than (x, position_ids)")
        types = getattr(module, "rope_type", None)
        changing = set(types.values() if isinstance(types, dict) else [types]) - STATIC_ROPE
        if changing:
            return Reason(f"rope type {', '.join(map(str, changing))}: its frequencies may change with the length")
        frequencies = [b for name, b in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if not frequencies:
            return Reason(f"{type(module).__name__} has no inv_freq")
        spec = Spec("rotary_cos_sin", {"M": 1, "K": 2 * frequencies[0].shape[0]}, torch.float32)
        return Choice(dispatch.choose("rotary_cos_sin", spec, device), 0, 0, site.bytes, spec=spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        return adopt(FusedRotaryEmbedding, site.original)
