"""Encoder-decoders that docs/choosing.md names: their decoder layers are fused, by the plan."""

from __future__ import annotations

import re

import pytest

import accelpatch
from accelpatch.device import KNOWN, probe
from tests.test_choosing import TEXTS, model_of


def encoder_decoders() -> list[str]:
    """The model types that the page names as encoder-decoders with fused layers."""
    return re.findall(r"`(\w+)`", TEXTS["choosing.md"].partition("by\n`exact`: ")[2].partition("\n([how]")[0])


@pytest.mark.parametrize("kind", encoder_decoders())
def test_encoder_decoders_of_the_page(kind: str) -> None:
    model = model_of(kind)
    for recipe, device in (("int8", KNOWN["sm_90"]), ("exact", KNOWN["gfx942"]), ("exact", probe("cpu"))):
        planned = accelpatch.plan(model if device.kind == "cuda" else model.float(), recipe, device=device)
        layers = [one for one in planned.report().sites if one.replacer == "fused_layer"]
        assert layers
        assert all(one.fused for one in layers), layers[0].by_modules
