"""The groups of activation smoothing in a model, by the table of families."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from accelpatch.models.family import LAYER_ENDINGS, Family, child_of, family_of_class
from accelpatch.models.form import Smoothing

OF_ONE = {"gate_up_proj": "second half", "qkv_proj": "values"}  # role of a source -> its rows that are read


@dataclass(frozen=True)
class SmoothingGroup:
    """What is smoothed together. source: path of the norm or linear layer that makes the channels. consumers: paths of
    all linear layers that read them.

    rows, size: how they lie in the source and its consumers, see quant.smoothing.Channels. kind: the same for every
    layer, such as "input_layernorm -> q_proj, k_proj, v_proj".
    """

    source: str
    consumers: tuple[str, ...]
    kind: str
    rows: str = "all"
    size: int = 0


def smoothing_groups(model: nn.Module) -> list[SmoothingGroup]:
    """Every group of the model's decoder layers; none for a model of an unknown family."""
    found: list[SmoothingGroup] = []
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for path, layer in model.named_modules():
        family = next((one for end in LAYER_ENDINGS if (one := family_of_class(layer, end)) is not None), None)
        for group in () if family is None else family.smoothing:
            there = [name for name in group.consumers if child_of(layer, name) is not None]
            asked = all(getattr(config, name, None) == value for name, value in group.where.items())
            if family is not None and asked and there and child_of(layer, group.source) is not None:
                found.append(_resolved(path, group, family, config))
    return found


def _resolved(path: str, group: Smoothing, family: Family, config: Any) -> SmoothingGroup:
    place = re.sub(r"\d+", "#", f".{path}.{group.source}")
    role = next((role for pattern, role in family.roles.items() if fnmatchcase(place, pattern)), "")
    rows = OF_ONE.get(role, "all")
    rows = "values by head" if rows == "values" and family.by_head else rows
    size = 0
    if role in ("v_proj", "qkv_proj"):
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = ", ".join(name.rpartition(".")[2] for name in group.consumers)
    kind = f"{group.source.rpartition('.')[2]} -> {names}"
    return SmoothingGroup(
        f"{path}.{group.source}", tuple(f"{path}.{name}" for name in group.consumers), kind, rows, size
    )
