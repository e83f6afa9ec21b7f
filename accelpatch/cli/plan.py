"""``accelpatch plan``: show what a recipe would replace in a model; reads its configuration, not its weights."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console, options
from .options import JsonOption, PluginOption, RecipeOption


def plan(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="ARCH", help="Plan for another GPU: gfx942, sm_90, ...; default: this CPU."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Length of the KV cache in tokens, for the memory check.")
    ] = None,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a recipe would replace in MODEL, and whether the result fits in memory. Loads no weights."""
    options.check_original(model, fetched=False)
    _check_arch(arch)
    options.prepare(recipe, plugin)
    from accelpatch import api

    options.refuse_patched(model)
    planned = api.plan_from_config(model, recipe, arch=arch, max_length=max_length)
    if json:
        console.print_json(planned.to_dict())
    else:
        print(planned)


def _check_arch(arch: str | None) -> None:
    """Raise PlanError for an arch of which no facts are known."""
    from accelpatch import device as devices
    from accelpatch.errors import PlanError

    if arch is not None and arch not in devices.KNOWN:
        raise PlanError(f"no facts are known of the arch {arch}; known are: {', '.join(devices.KNOWN)}")
