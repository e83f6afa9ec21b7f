"""The rotary embedding of a decoder: which kinds fast paths apply, and its frequencies."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.models.family import STATIC_ROPE, family_of_class
from accelpatch.modules.rotary import FusedRotaryEmbedding

LONGROPE = "longrope"
SECTIONS, CYCLIC = AXES = ("axes", "cyclic axes")  # Rotary.tables of embeddings whose positions have axes
IN_PLACE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)  # writes of longrope's frequencies


def rotary_why_not(rotary: Any) -> str | None:
    """Why a model's rotary embedding is not one that fused layers apply; None where it is."""
    if isinstance(rotary, FusedRotaryEmbedding):
        return None
    if by_length(rotary):
        return None if IN_PLACE else "transformers before 5.23 puts other frequencies into its rotary embedding"
    family = family_of_class(rotary, "RotaryEmbedding")
    if family is None or family.rotary is None or not family.rotary.tables:
        return "its rotary embedding was not replaced"
    kind = getattr(rotary, "rope_type", None)
    return None if kind in STATIC_ROPE else f"its rope type is {kind}"


def by_length(rotary: Any) -> bool:
    """Whether a rotary embedding of a known family chooses between two sets of frequencies by the length (longrope)."""
    known = family_of_class(rotary, "RotaryEmbedding") is not None
    return known and getattr(rotary, "rope_type", None) == LONGROPE


def by_axes(rotary: Any) -> bool:
    """Whether positions of a rotary embedding have several axes, such as time, height and width of a picture."""
    return _tables(rotary) in AXES


def _tables(rotary: Any) -> str | None:
    family = family_of_class(rotary, "RotaryEmbedding")
    return None if family is None or family.rotary is None else family.rotary.tables


def axes_of(rotary: Any) -> Tensor | None:
    """For each frequency, the index of the axis whose positions it multiplies: int64 [R / 2].

    None where positions have one axis, or the configuration does not say how many frequencies each axis has.
    """
    kind, frequencies = _tables(rotary), getattr(rotary, "inv_freq", None)
    said = parameters(getattr(rotary, "config", None)).get("mrope_section")
    sections = getattr(rotary, "mrope_section", said)
    if kind not in AXES or frequencies is None or not sections:
        return None
    if kind == SECTIONS:
        if sum(sections) != len(frequencies):
            return None  # transformers raises an error at the first call
        runs = [axis % 3 for axis, size in enumerate(sections) for _ in range(size)]
        return torch.tensor(runs, device=frequencies.device)
    places = torch.arange(len(frequencies), device=frequencies.device)
    axis = places % 3
    limits = torch.tensor([3 * size for size in sections], device=frequencies.device)[axis]
    return torch.where(places < limits, axis, 0)


def of_one_axis(positions: Tensor) -> Tensor | None:
    """Positions [B, L] for positions [A, B, L] whose axes agree, as those of text do; None where they differ.

    Positions [B, L] are returned as they are. Where A is 4, the first row counts tokens and is no axis.
    """
    if positions.dim() != 3:
        return positions
    axes = positions[1:] if len(positions) == 4 else positions
    return axes[0] if bool((axes == axes[:1]).all()) else None


def planned_by_length(config: Any) -> bool:
    """The same of a configuration."""
    return parameters(config).get("rope_type") == LONGROPE


def fraction(config: Any) -> float:
    """The fraction of a head's columns that get the rotary embedding, by a configuration."""
    said = parameters(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    return float(said or 1.0)


def parameters(config: Any) -> dict[str, Any]:
    """What a configuration says of the rotary embedding."""
    return getattr(config, "rope_parameters", None) or {}


def rope(rotary: nn.Module, kind: str) -> tuple[Tensor, float]:
    """(inv_freq, attention scaling) of a replaced rotary embedding for layers of a type. Raises CannotFuse."""
    prefix = "" if one_rope(rotary) else f"{kind}_"
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    if frequencies is None:
        raise CannotFuse(f"its rotary embedding has no {prefix}inv_freq")
    return frequencies, float(getattr(rotary, f"{prefix}attention_scaling"))


def one_rope(rotary: nn.Module) -> bool:
    """Whether all layers share one set of rotary frequencies."""
    return hasattr(rotary, "inv_freq")
