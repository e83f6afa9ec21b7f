"""``accelpatch quantize``: write a model, patched by a recipe, into a folder from which it loads as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption, StatisticsOption

if TYPE_CHECKING:
    from accelpatch.report import Report


def quantize(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder; written all or nothing.")],
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    statistics: StatisticsOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in DIR, if it is one that accelpatch saved.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file, such as 2GB.")] = "5GB",
    verify: options.VerifyOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Quantise MODEL by a recipe while it loads, and save it; what was done is kept if this is interrupted."""
    from accelpatch.checkpoints import target

    target.shard_size(max_shard_size)
    options.check_original(model)
    target.check_folder(out)
    target.check_new(out, overwrite)
    options.prepare(recipe, plugin)
    with resumable(out):
        from accelpatch import api

        where = options.torch_device(device)
        with console.progress_bars() as progress:
            report = api.quantize(
                model, recipe, out, max_shard_size=max_shard_size, dtype=dtype, device=where, statistics=statistics,
                verify=verify, progress=progress, overwrite=overwrite,
            )  # fmt: skip
    console.print_result(json, {"folder": str(out), "report": report.to_dict()}, _facts(model, out, report))


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Context manager: says at the start what an interrupted run left, and at an interrupt what is kept."""
    from accelpatch.checkpoints import target

    place = target.beside(out)
    if kept := target.unfinished(out):
        console.note(f"going on: {kept} finished weights of an interrupted run are in {place}")
    try:
        yield
    except KeyboardInterrupt:
        kept = target.unfinished(out)
        left = f"{kept} finished weights are kept in {place}: the same command goes on from there"
        console.note(f"interrupted; {out} is as it was. {left if kept else 'No weight was finished'}")
        raise typer.Exit(130) from None


def _facts(model: str, out: Path, report: Report) -> list[tuple[str, str]]:
    from accelpatch.report import human, ratio

    from .run import verification_facts

    size = sum(file.stat().st_size for file in out.glob("model*.safetensors"))
    return [
        ("model", model),
        ("recipe", report.recipe),
        ("sites replaced", f"{report.replaced} of {len(report.sites)}"),
        ("weights", f"{human(report.resident_bytes[0])} -> {human(size)} ({ratio((report.resident_bytes[0], size))})"),
        ("folder", f"{out}: accelpatch run {out}"),
        *verification_facts(report),
        *(("note", text) for text in report.notes),
    ]
