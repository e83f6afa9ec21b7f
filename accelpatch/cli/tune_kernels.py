"""``accelpatch tune kernels``: times the kernels of a model's plan on this machine, and stores the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption

if TYPE_CHECKING:
    from accelpatch.tuning.kernels import Timed


def kernels(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="N,N,...", help="Rows of x (tokens) in one call, to measure with.")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, metavar="SECONDS", help="Time of all measurements together.")
    ] = 150.0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table, and store nothing.")] = False,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Time the kernels of MODEL with a recipe; later calls run a kernel that is at least 2% faster than the default."""
    wanted = options.numbers(rows, "--rows") if rows else []
    options.check_original(model)
    options.prepare(recipe, plugin)
    from accelpatch import api

    network = options.open_model(model, dtype, device).model
    options.patch(network, recipe=recipe, verify="off")
    with console.progress_bars() as progress:
        found = api.tune_kernels(network, rows=wanted, budget=budget, store=not dry_run, progress=progress)
    if json:
        console.print_json([one.to_dict() for one in found])
        return
    _print(found)
    print("nothing is stored (--dry-run)" if dry_run else "stored; `accelpatch cache clear kernels-tuned` forgets it")


def _print(found: list[Timed]) -> None:
    from accelpatch.report import table

    rows = [("operation", "sizes", "rows", "default", "us", "fastest", "us", "from now on")]
    for one in found:
        best = min(one.seconds, key=one.seconds.__getitem__)
        sizes = " ".join(f"{name}={size}" for name, size in one.sizes.items() if name not in ("M", "L"))
        times = f"{one.seconds[one.default] * 1e6:.1f}", f"{one.seconds[best] * 1e6:.1f}"
        rows.append((one.op, sizes, str(one.rows), one.default, times[0], best, times[1], one.chosen))
    print(table(rows))
    for name, reason in {(name, reason): None for one in found for name, reason in one.refused.items()}:
        print(f"does not count: {name}: {reason}")
    gained = [one for one in found if one.chosen != one.default]
    print(f"{len(gained)} of {len(found)} calls take another implementation than the default")
