"""``accelpatch quantize``: write a model, patched by a recipe, into a folder from which it loads as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption, StatisticsOption


def quantize(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write; replaced all or nothing.")],
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    statistics: StatisticsOption = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file, such as 2GB.")] = "5GB",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Quantise MODEL by a recipe while it loads, and save it; what was done is kept if this is interrupted."""
    options.prepare(recipe, plugin)
    from accelpatch import api

    where = options.torch_device(device)
    with console.progress_bars() as progress:
        report = api.quantize(
            model,
            recipe,
            out,
            max_shard_size=max_shard_size,
            dtype=dtype,
            device=where,
            statistics=statistics,
            progress=progress,
        )
    if json:
        console.print_json({"folder": str(out), "report": report.to_dict()})
    else:
        console.print_facts(_facts(model, out, report))


def _facts(model: str, out: Path, report: object) -> list[tuple[str, str]]:
    from accelpatch.report import Report, human, ratio

    from .run import verification_facts

    assert isinstance(report, Report)
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
