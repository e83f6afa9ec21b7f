"""``accelpatch plan``: show what a recipe would replace in a model; reads its configuration, not its weights."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console, options, ranks
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
    why: Annotated[
        bool, typer.Option("--why", help="Also which kernel runs for how many rows, and why others do not.")
    ] = False,
    tp: ranks.TensorParallelOption = 1,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a recipe would replace in MODEL, and whether the result fits in memory. Loads no weights."""
    from accelpatch import device as devices
    from accelpatch.errors import PlanError

    options.check_original(model, fetched=False)
    if arch is not None and arch not in devices.KNOWN:
        raise PlanError(devices.unknown(arch))
    options.prepare(recipe, plugin)
    from accelpatch import api

    options.refuse_patched(model)
    planned = api.plan_from_config(model, recipe, arch=arch, max_length=max_length, ranks=tp)
    if json:
        console.print_json(planned.to_dict() | ({"why": planned.why().splitlines()} if why else {}))
    else:
        print(planned, *(["", planned.why()] if why else []), sep="\n")
