"""``accelpatch tune auto`` and ``tune trial``: the fastest recipe within bounds, and the measurement of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelpatch.errors import AccelpatchError

from . import checks, console, options
from .eval import CHAPTER
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption

if TYPE_CHECKING:
    from accelpatch.tuning.auto import Search

BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Sequences that are generated at once.")]
PromptOption = Annotated[int, typer.Option("--prompt", min=1, help="Length of the prompts in tokens.")]
NewOption = Annotated[int, typer.Option("--new", min=2, help="New tokens of each sequence.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Timed repetitions of each recipe at most.")]
TextOption = Annotated[
    Path | None, options.file_option("--text", help="UTF-8 text for the KL divergence; default: a chapter of a novel.")
]
TokensOption = Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text that are used at most.")]
MaxKlOption = Annotated[
    float | None, typer.Option("--max-kl", min=0, metavar="NATS", help="Largest mean KL divergence from the original.")
]
MaxGbOption = Annotated[
    float | None, typer.Option("--max-gb", min=0, metavar="GB", help="Largest memory, in 1e9 bytes.")
]
RecipesOption = Annotated[
    str | None, typer.Option("--recipes", metavar="NAME,...", help="Names or files to try; default: all bundled.")
]
LimitOption = Annotated[float, typer.Option("--limit", min=1, metavar="SECONDS", help="Time limit of a trial.")]
BudgetOption = Annotated[
    float,
    typer.Option("--budget", min=1, metavar="SECONDS", help="Time of all trials; recipes left after it are not tried."),
]
OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="The recipe file to write.")]


def trial(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            metavar="NAME|FILE",
            help="Name of a bundled recipe, or a YAML file; default: the original.",
        ),
    ] = None,
    original: Annotated[bool, typer.Option("--beside", help="Time the original too, in the same process.")] = False,
    batch: BatchOption = 1,
    prompt: PromptOption = 128,
    new: NewOption = 64,
    repeats: RepeatsOption = 3,
    hopeless: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A model whose first call takes longer is timed only once.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Add `runtime: {compile: default}` to the recipe.")
    ] = False,
    text: TextOption = None,
    tokens: TokensOption = 512,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
) -> None:
    """Measure MODEL with one recipe, or as it is, in this process: what `tune auto` runs for each. Prints JSON."""
    words = checks.text_of(text or CHAPTER)
    options.check_original(model)
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    from accelpatch import api
    from accelpatch.bench.generate import Shape
    from accelpatch.tuning.auto import COMPILED

    from . import prompt as prompts

    loaded = options.open_model(model, dtype, device)
    prompts.check_fits(loaded.model, prompt, new)
    tokenizer = prompts.tokenizer_of(loaded)
    ids = prompts.encode(tokenizer, words, chat=False, option="--text")[:, :tokens].to(loaded.model.device)
    use = api.Use(Shape(batch, prompt, new), repeats, hopeless=math.inf if hopeless is None else hopeless)
    wanted = None if recipe is None else api.recipe_named(recipe + (COMPILED if compile else ""))
    console.print_json(api.trial(loaded.model, wanted, ids, use, tokenizer=tokenizer, beside=original))


def auto(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    max_kl: MaxKlOption = None,
    max_gb: MaxGbOption = None,
    batch: BatchOption = 1,
    prompt: PromptOption = 128,
    new: NewOption = 64,
    recipes: RecipesOption = None,
    limit: LimitOption = 300.0,
    budget: BudgetOption = 200.0,
    repeats: RepeatsOption = 3,
    text: TextOption = None,
    tokens: TokensOption = 512,
    out: OutOption = Path("tuned.yaml"),
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Find the recipe with which MODEL generates fastest within bounds of fidelity and memory; write it as a file."""
    _check(model, text, out, plugin)
    names = [name.strip() for name in (recipes or "").split(",") if name.strip()]
    for name in names:
        options.check_replacers(name, plugin)
    where = str(options.torch_device(device))
    from accelpatch import api
    from accelpatch.bench.generate import Shape
    from accelpatch.tuning.auto import Bounds

    given = {"batch": batch, "prompt": prompt, "new": new, "repeats": repeats, "tokens": tokens, "device": where}
    given |= {"dtype": dtype} | ({"text": text} if text else {})
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    words += [word for file in plugin or [] for word in ("--plugin", str(file))]
    run, shape, bounds = partial(_run_in_child, (model, *words)), Shape(batch, prompt, new), Bounds(max_kl, max_gb)
    found = api.tune_auto(
        model, run, partial(run, original=True), shape, bounds, device=where, names=names, limit=limit, budget=budget
    )
    _finish(found, model, where, out, json)


def _run_in_child(words: Sequence[str], name: str, seconds: float, hopeless: float, original: bool = False) -> Any:
    """The figures of a trial in a child process, or a text that says why there are none."""
    from accelpatch.tuning import children
    from accelpatch.tuning.auto import COMPILED, ORIGINAL

    console.note(f"{name} and the original in one process" if original else f"trying {name}")
    chosen = [] if name == ORIGINAL else ["--recipe", name.removesuffix(COMPILED)]
    chosen += ["--compile"] if name.endswith(COMPILED) else []
    chosen += ["--hopeless", str(hopeless)] if math.isfinite(hopeless) else []
    command = [*children.ACCELPATCH, "tune", "trial", *words, *chosen, *(["--beside"] if original else [])]
    return children.run_json(command, seconds)


def _check(model: str, text: Path | None, out: Path, plugin: list[Path] | None) -> None:
    """Raise AccelpatchError for wrong arguments, before anything is measured."""
    from accelpatch.checkpoints import target

    checks.text_of(text or CHAPTER)
    options.check_original(model)
    target.check_file(out)
    options.prepare(options.DEFAULT_RECIPE, plugin)
    options.refuse_patched(model)


def _finish(found: Search, model: str, device: str, out: Path, json: bool) -> None:
    from accelpatch import api

    if found.chosen is not None:
        out.write_text(api.tuned_recipe(found, model, device), encoding="utf-8")
    if json:
        console.print_json(found.to_dict() | {"out": str(out) if found.chosen else None})
    else:
        _print(found)
    if found.chosen is None:
        raise AccelpatchError(f"{found.refused}; no recipe is written")
    if not json:
        print(f"written: {out} ({found.chosen.name}); `accelpatch run {model} --recipe {out}` runs it")


def _print(found: Search) -> None:
    from accelpatch.report import table

    rows = [("recipe", "s a call", "x original", "KL, nats", "top-1", "GB", "within")]
    for one in (found.original, *sorted(found.trials, key=lambda each: each.seconds)):
        if one.failed:
            continue
        within = "" if one is found.original else "yes" if one in found.within() else "no"
        gain = found.original.seconds / one.seconds
        size = f"{one.size / 1e9:.2f}" if one.size else ""
        rows.append((one.name, f"{one.seconds:.3f}", f"{gain:.2f}", f"{one.kl:.4f}", f"{one.top1:.1%}", size, within))
    print(table(rows))
    for name, why in ({one.name: one.failed for one in found.trials if one.failed} | found.skipped).items():
        print(f"not tried to the end: {name}: {why}")
