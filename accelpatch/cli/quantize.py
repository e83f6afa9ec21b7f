"""``accelpatch quantize``: writes a model patched by a recipe into a folder, from which it loads patched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import checks, console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, StatisticsOption

if TYPE_CHECKING:
    from accelpatch.recipe.recipe import Recipe
    from accelpatch.report import Report


MethodOption = Annotated[
    str | None, typer.Option(help="How weights are rounded: rtn, gptq, awq or gptq+awq; default: the recipe's.")
]
BitsOption = Annotated[int | None, typer.Option(help="3, 4 or 8: the recipe int3, int4 or int8, instead of --recipe.")]
BudgetOption = Annotated[
    str | None, typer.Option(help="Bits a weight, such as 4.5bits: each layer's are chosen by measured KL.")
]
DataOption = Annotated[
    Path | None,
    options.file_option(callback=checks.text_file, help="UTF-8 text to calibrate on; default: the model's own."),
]
SamplesOption = Annotated[int | None, typer.Option(min=1, help="Windows of that text; default: the recipe's.")]
LengthOption = Annotated[int | None, typer.Option(min=1, help="Tokens of a window; default: the recipe's.")]


def quantize(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder; written all or nothing.")],
    recipe: options.OwnRecipeOption = None,
    method: MethodOption = None,
    bits: BitsOption = None,
    budget: BudgetOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    length: LengthOption = None,
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
    wanted = _recipe(recipe, method, _base(recipe, bits, budget), samples, length, plugin)
    with resumable(out):
        from accelpatch import api

        where = options.torch_device(device)
        with console.progress_bars() as progress:
            report = api.quantize(
                model, wanted, out, max_shard_size=max_shard_size, dtype=dtype, device=where, statistics=statistics,
                data=data, verify=verify, progress=progress, overwrite=overwrite, budget=budget,
            )  # fmt: skip
    console.print_result(json, {"folder": str(out), "report": report.to_dict()}, _facts(model, out, report))


def _base(recipe: str | None, bits: int | None, budget: str | None) -> int | None:
    """The bits of the recipe to start from: `bits`, or 4 for a budget without a recipe. Raises BadParameter if the
    options contradict each other."""
    if budget is None:
        return bits
    if bits is not None:
        raise typer.BadParameter("a budget chooses the bits of each layer: give one of the two", param_hint="--bits")
    from accelpatch.recipe import mixed

    mixed.budget_of(budget)
    return 4 if recipe is None else None


def _recipe(
    recipe: str | None, method: str | None, bits: int | None, samples: int | None, length: int | None,
    plugins: list[Path] | None,
) -> str | Recipe:  # fmt: skip
    """The recipe, changed as the options say. Raises BadParameter if they contradict each other."""
    from accelpatch.recipe import methods
    from accelpatch.recipe import recipe as recipes

    if recipe is not None and bits is not None:
        raise typer.BadParameter("a recipe says how many bits: give one of the two", param_hint="--bits")
    named = recipe or options.DEFAULT_RECIPE
    options.prepare(named, plugins)
    found = recipes.load(named) if bits is None else methods.of_bits(bits)
    if method is not None:
        return methods.by_method(found, method, samples, length)
    if samples is not None or length is not None:
        return methods.with_text(found, samples, length)
    return found


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Context manager: prints at the start what an interrupted run has finished, and at an interrupt what is kept."""
    from accelpatch.checkpoints import target

    place = target.unfinished_folder(out)
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
