"""The names of the built-in replacers: a recipe that names none of them is refused before torch is imported."""

from __future__ import annotations

from accelpatch.errors import PlanError
from accelpatch.recipe.recipe import Recipe

KEEP = "keep"  # leaves the site as it is
BUILT_IN = (
    "int8_weight_only", "int4_weight_only", "int3_weight_only",
    "nf4_weight_only", "fp4_weight_only", "mxfp4_weight_only", "nvfp4_weight_only",
    "fp8_blocks",
    "fp8_weight_only", "w8a8", "w8a8_fp8", "int8_opt", "gguf_blocks", "as_stored", "gemv", "compact", "rmsnorm",
    "layernorm", "fused_layer", "rotary_embedding", "gated_mlp", "flash_attention", "experts", "int8_experts",
    "int4_experts", "mxfp4_experts", "nvfp4_experts", "fp8_block_experts",
)  # fmt: skip


def check(recipe: Recipe) -> None:
    """Raise PlanError where a rule names a replacer that is not built in; for a recipe that is used without plugins."""
    for rule in recipe.rules:
        if rule.replace not in (KEEP, *BUILT_IN):
            known = ", ".join(sorted(BUILT_IN))
            raise PlanError(
                f"{rule.place}: no replacer is called {rule.replace}; registered are: {known}; --plugin FILE registers "
                "your own"
            )
