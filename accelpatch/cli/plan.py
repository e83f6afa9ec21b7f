"""``accelpatch plan``: what a recipe would do to a model, from its configuration alone."""

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
        typer.Option("--arch", metavar="ARCH", help="Plan for a machine that is not here: gfx942, sm_90, ..."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of cache to count when saying whether it fits.")
    ] = None,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Say what a recipe would replace in MODEL, and whether the result fits; loads no weights."""
    options.prepare(recipe, plugin)
    from accelpatch import api

    planned = api.plan_from_config(model, recipe, arch=arch, max_length=max_length)
    if json:
        console.print_json(planned.to_dict())
    else:
        print(planned)
