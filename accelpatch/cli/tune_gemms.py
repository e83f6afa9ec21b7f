"""``accelpatch tune tunableop``: tune the GEMMs that torch's own libraries run for a model, by torch's TunableOp."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import console, options
from .options import DtypeOption, JsonOption, PluginOption
from .tune_auto import BatchOption, NewOption, PromptOption

DevicesOption = Annotated[str, typer.Option("--devices", metavar="N,N,...", help="GPUs to tune on, by their numbers.")]
SecondsOption = Annotated[float, typer.Option("--seconds", min=1, help="Time limit of one GEMM.")]
RecordedOption = Annotated[
    Path | None, options.file_option("--gemms", help="File of GEMMs that torch recorded before; MODEL is not run then.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="The CSV file to write.")]


def tunableop(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: options.OwnRecipeOption = None,
    devices: DevicesOption = "0",
    batch: BatchOption = 1,
    prompt: PromptOption = 128,
    new: NewOption = 64,
    seconds: SecondsOption = 60.0,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Time limit of the recorded run, in seconds.")] = 900.0,
    gemms: RecordedOption = None,
    out: OutOption = Path("tunableop.csv"),
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Record the GEMMs of a run of MODEL, and tune them in child processes; a recipe names the file that is written."""
    chosen = [part.strip() for part in devices.split(",")]
    if not all(part.isdigit() for part in chosen):
        raise typer.BadParameter(f"{devices!r} is no list of numbers of GPUs, such as 0,1", param_hint="--devices")
    _check(model, recipe, out, plugin)
    from accelpatch.tuning import gemms as tuning

    shape = ["--batch", str(batch), "--prompt", str(prompt), "--new", str(new)]
    words = [*shape, "--dtype", dtype, *(["--recipe", recipe] if recipe else [])]
    words += [word for file in plugin or [] for word in ("--plugin", str(file.resolve()))]
    found = _lines(gemms) if gemms else _recorded(model, words, chosen[0], limit)
    console.note(f"{len(found)} GEMMs to tune on {len(chosen)} devices")
    with console.progress_bars() as progress:
        made = tuning.tune(found, chosen, out, seconds=seconds, progress=progress)
    facts = {"gemms": len(found), "tuned": len(made.results), "failed": made.failed, "lost": made.lost}
    lines = [(name, why) for part in (made.failed, made.lost) for name, why in part.items()]
    console.print_result(json, facts | {"out": str(out)}, [("tuned", f"{len(made.results)} of {len(found)}"), *lines])
    if not json:
        print(f"written: {out}; a recipe takes it by `runtime: {{tunableop: {out}}}`")


def _check(model: str, recipe: str | None, out: Path, plugin: list[Path] | None) -> None:
    from accelpatch.checkpoints import target

    options.check_original(model)
    target.check_file(out)
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)


def _lines(file: Path) -> list[str]:
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("Validator")))


def _recorded(model: str, words: list[str], device: str, limit: float) -> list[str]:
    """The GEMMs of a run of the model in a child process."""
    from accelpatch.tuning import children
    from accelpatch.tuning import gemms as tuning

    console.note(f"recording the GEMMs of {model}")
    with tempfile.TemporaryDirectory() as folder:
        files = {tuning.UNTUNED: str(Path(folder, "untuned.csv")), tuning.RESULTS: str(Path(folder, "results.csv"))}
        command = [*children.ACCELPATCH, "tune", "trial", model, *words, "--repeats", "1", "--device", f"cuda:{device}"]
        answer = children.run_json(command, limit, {**tuning.RECORD, **files})
        if isinstance(answer, str):
            raise AccelpatchError(f"the run of {model} that is recorded failed: {answer}")
        found = tuning.untuned_in(Path(folder))
    if not found:
        raise AccelpatchError(
            f"torch recorded no GEMM of {model}: none of its own libraries run for it, or this build has no TunableOp"
        )
    return found
