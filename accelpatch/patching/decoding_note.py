"""The plan's note about how generate() of an encoder-decoder runs, which no entry of the plan says."""

from __future__ import annotations

from torch import nn

from accelpatch.device import Device
from accelpatch.recipe.recipe import Recipe

CAPTURED = "generate(): an encoder-decoder, whose encoder, first tokens and steps are captured graphs of all this"
NATIVE = (
    "generate(): an encoder-decoder, whose steps are native ones where all layers of its decoder are fused and in "
    "float32, else all of this one by one"
)
BY_MODULES = "generate(): an encoder-decoder, which runs these modules one by one"


def decoding_note(model: nn.Module, recipe: Recipe, device: Device) -> list[str]:
    """The note for an encoder-decoder that can generate; empty for any other model."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not encodes or not getattr(model, "can_generate", bool)():
        return []
    if device.kind == "cpu":
        return [NATIVE]
    if recipe.runtime.graph != "auto" or recipe.runtime.cache != "auto":
        return [f"{BY_MODULES}: the recipe's runtime says so"]
    return [CAPTURED]
