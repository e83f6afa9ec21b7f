"""``accelpatch finetune``: train adapters, or a whole model, by a configuration, on PEFT and TRL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from accelpatch.errors import RecipeError

from . import console, options
from .options import JsonOption

DEFAULT_OUT = Path("finetuned")

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Catalog name, folder or hub id; default: the configuration's.")
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME|FILE",
        help="Bundled one, or a YAML file; default: lora with --data, else puzzles.",
    ),
]
DataOption = Annotated[
    Path | None, options.file_option("--data", "-d", help="JSON lines; default: puzzles that accelpatch makes.")
]
EvaluationOption = Annotated[
    Path | None, options.file_option("--evaluation", help="JSON lines to evaluate on; default: a part of --data.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Patches the base model; none: it is not patched."),
]
OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new folder, or that of a stopped run.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another value of the configuration; repeatable."),
]
ShowOption = Annotated[
    str | None, typer.Option("--show", metavar="NAME|FILE", help="Print a configuration with every value, and end.")
]


def finetune(
    model: ModelArgument = None,
    config: ConfigOption = None,
    data: DataOption = None,
    evaluation: EvaluationOption = None,
    recipe: RecipeOption = None,
    out: OutOption = DEFAULT_OUT,
    settings: SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew in a folder that holds a run.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List the bundled configurations, and end.")] = False,
    show: ShowOption = None,
    device: options.DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Fine-tune MODEL: LoRA, QLoRA, DPO or every weight. With nothing else: word puzzles, in minutes on a CPU.

    The same command goes on where a stopped run ended.
    """
    from accelpatch.training import configuration

    if list_them:
        print_bundled(json)
        return
    if show is not None:
        print(configuration.load(show).dump(), end="")
        return
    wanted = _settings(config, model, data, evaluation, recipe, settings)
    console.quiet_transformers()
    console.plain_warnings()
    _check(wanted, out, overwrite)
    with interruptible(out):
        from accelpatch import api

        where = None if device == "auto" else options.torch_device(device)
        with console.progress_bars() as progress:
            result = api.finetune(out, wanted, device=where, overwrite=overwrite, say=console.note, progress=progress)
    if options.is_main_process():
        console.print_result(json, {"folder": str(out), **result}, _facts(out, result))


def print_bundled(json: bool) -> None:
    """Print the names and descriptions of the bundled configurations."""
    from accelpatch.training import configuration

    found = [configuration.load(name) for name in configuration.bundled()]
    document = [{"name": one.name, "description": one.description.strip()} for one in found]
    console.print_result(json, document, ((one.name, one.description.strip()) for one in found))


def _settings(
    config: str | None, model: str | None, data: Path | None, evaluation: Path | None, recipe: str | None,
    given: list[str] | None,
) -> Any:  # fmt: skip
    """The configuration, with the values that options give."""
    from accelpatch.training import configuration

    default = configuration.DEFAULT if data is None else configuration.WITH_DATA
    found = configuration.load(config or default)
    named = {
        "model": model, "recipe": recipe, "data.file": None if data is None else str(data),
        "data.evaluation": None if evaluation is None else str(evaluation),
    }  # fmt: skip
    options_given = {key: value for key, value in named.items() if value is not None}
    changes = configuration.names_of(given or [])
    if both := sorted(set(options_given) & set(changes)):
        raise RecipeError(f"{both[0]} is given by an option and by --set: leave one out", source="--set")
    return found.with_values(options_given | changes)


def _check(wanted: Any, out: Path, overwrite: bool) -> None:
    """Raise an error for wrong packages, data, folder or model, before torch is imported."""
    from accelpatch.checkpoints import target
    from accelpatch.training import prepare

    prepare.check_packages()
    run = prepare.prepare(wanted, out)
    if options.is_main_process():
        run.folder.check(run.settings, run.data, overwrite=overwrite)
        target.check_folder(out)
    options.check_name(wanted["model"])


@contextmanager
def interruptible(out: Path) -> Iterator[None]:
    """Context manager: an interrupt prints which checkpoint is kept, and exits with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        from accelpatch.training.folder import Folder

        whole = Folder(out).whole()
        kept = f"the checkpoint of step {whole[-1]} is kept in {out}" if whole else "no checkpoint was written yet"
        console.note(f"interrupted; {kept}. The same command goes on from there")
        raise typer.Exit(130) from None


def _facts(out: Path, result: dict[str, Any]) -> list[tuple[str, str]]:
    from accelpatch.report import human

    rate, loss = result["tokens_per_second"], result["eval_loss"]
    exact = [result["exact_before"], result["exact_after"]]
    whole = result["method"] == "full"
    named = f"{out}" if whole else f"{result['model']} --adapter {out}"
    raw = "" if result["chat_template"] else " --raw"
    return [
        ("model", f"{result['model']}, {result['method']}, recipe {result['recipe']}"),
        ("steps", f"{result['steps']}, of {result['rows']} rows in all"),
        ("loss", "not known" if result["loss"] is None else f"{result['loss']:.4f}, the mean of the last ten steps"),
        *([] if loss is None else [("held-out loss", f"{loss:.4f}")]),
        *([] if None in exact else [("exact match", f"{exact[0]:.0%} -> {exact[1]:.0%} of held-out answers")]),
        ("time", f"{result['seconds']:.0f} s" + ("" if rate is None else f", {rate:.0f} tokens/s while training")),
        ("peak memory", human(result["peak_memory"])),
        ("folder", f'{out}: accelpatch run {named}{raw} --prompt "..."'),
    ]
