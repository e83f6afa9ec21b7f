"""What is known of the bundled recipes' quality: the figures of one model, for a report that could not measure its own.

Source: docs/fidelity.md, float32 SmolLM2-135M-Instruct moved off the grid that it was published on.
"""

from __future__ import annotations

from accelpatch.recipe.recipe import Recipe, bundled, load

MODEL = "SmolLM2-135M-Instruct"
#: (recipe, kind of device) -> mean KL in nats, top-1 agreement; on a GPU int8 has one scale a row
KNOWN = {
    ("int8", "cpu"): (0.00254, 0.976),
    ("int8", "cuda"): (0.00542, 0.951),
    ("smoothquant", "cpu"): (0.01315, 0.941),
    ("fp8", "cpu"): (0.02754, 0.911),
    ("int4", "cpu"): (0.38908, 0.679),
}
UNMEASURED = "not measured, for the original was not loaded: accelpatch eval compares the two"


def of_loaded(recipe: Recipe, kind: str) -> str:
    """What to say of the quality of a model that was quantised before or while it was loaded. kind: the device's."""
    own = recipe.name in bundled() and load(recipe.name) == recipe
    if not own or (recipe.name, kind) not in KNOWN:
        return UNMEASURED
    kl, top1 = KNOWN[recipe.name, kind]
    return f"{UNMEASURED}\nof {MODEL} with {recipe.name} it is KL {kl:.2g} nats, top-1 agreement {top1:.1%}"
