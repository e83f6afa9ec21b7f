"""``accelpatch merge``: adds adapters to a model's weights and saves the result, as floats or patched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption

OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder; written all or nothing.")]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Save it patched by this recipe; default: as floats."),
]


def merge(
    model: options.ModelArgument,
    out: OutOption,
    adapter: options.AdapterOption = None,
    recipe: RecipeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Add adapters to the weights of MODEL, and save it. Several adapters are added up."""
    if not adapter:
        raise AccelpatchError("there is nothing to merge: give --adapter DIR")
    from accelpatch.checkpoints import target

    target.check_empty(out)
    target.check_folder(out)
    options.check_original(model)
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    options.check_adapters(adapter)
    from accelpatch import api

    where = options.torch_device(device)
    with console.progress_bars() as progress:
        api.merge_files(model, adapter, out, recipe, dtype=dtype, device=where, progress=progress)
    document = {"folder": str(out), "model": model, "adapters": [str(one) for one in adapter], "recipe": recipe}
    facts = [("model", model), *(("adapter", str(one)) for one in adapter), ("recipe", recipe or "none: floats")]
    console.print_result(json, document, [*facts, ("folder", f"{out}: accelpatch run {out}")])
