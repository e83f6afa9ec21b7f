"""``accelpatch eval``: compares a patched model with the original on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import checks, console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption, StatisticsOption

CHAPTER = Path(__file__).with_name("alice.txt")
TITLE = "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter 1"  # in the public domain
MIN_TOKENS = (
    1000  # fewer give a warning: the standard error of an agreement of 70% is then 1.5%, and of 185 tokens 3.4%
)


DataOption = Annotated[
    Path | None,
    options.file_option(callback=checks.text_file, help="UTF-8 text to calibrate on; default: the model's own."),
]
WindowOption = Annotated[int, typer.Option(min=2, help="Tokens of one forward, the context included.")]
StrideOption = Annotated[int | None, typer.Option(min=1, help="Tokens from window to window; default: its length.")]
TasksOption = Annotated[str | None, typer.Option(help="Also tasks of lm-evaluation-harness, separated by commas.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Samples of each task; default: all.")]


def evaluate(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    text: Annotated[Path | None, options.file_option(help="UTF-8 text; default: a chapter of a novel.")] = None,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    statistics: StatisticsOption = None,
    data: DataOption = None,
    window: WindowOption = 512,
    stride: StrideOption = None,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Use at most this many tokens of the text.")] = 4096,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Compare MODEL before and after patching on a text: KL divergence, top-1 agreement and perplexity."""
    options.check_original(model)
    words, source = checks.text_of(text or CHAPTER), str(text or TITLE)
    options.prepare(recipe, plugin)
    from accelpatch import api

    if names := [name.strip() for name in (tasks or "").split(",") if name.strip()]:
        api.check_tasks(names)
    loaded = options.open_model(model, dtype, device)
    tokenizer, ids = _ids(loaded, words, source, max_tokens)
    given = {"statistics": statistics, "data": data, "tokenizer": tokenizer}
    with console.progress_bars() as progress:
        found = api.evaluate(
            loaded.model, recipe, ids.to(loaded.model.device), window=window, stride=stride, progress=progress, **given
        )
        scores = api.evaluate_tasks(loaded.model, recipe, names, limit=limit, **given) if names else []
    document = {"model": model, "recipe": recipe, "text": source} | found.to_dict()
    document |= {"tasks": [one.to_dict() for one in scores]} if scores else {}
    facts = [*_facts(source, found), *map(_of_task, scores)]
    console.print_result(json, document, [("model", model), ("recipe", recipe), *facts])


def _ids(loaded: Any, words: str, source: str, most: int) -> tuple[Any, Any]:
    """The tokenizer, and ids[1, at most `most`] of a text; prints a warning for fewer than MIN_TOKENS."""
    from . import prompt as prompts

    tokenizer = prompts.tokenizer_of(loaded)
    ids = prompts.encode(tokenizer, words, chat=False, option="--text")[:, :most]
    if 1 < (tokens := ids.shape[1]) <= MIN_TOKENS:
        console.warning(
            f"{source} has {tokens} tokens, and figures of fewer than {MIN_TOKENS} say little: give a longer text, or none"
        )
    return tokenizer, ids


def _of_task(score: Any) -> tuple[str, str]:
    error = "" if score.error is None else f" (standard error {score.error:.4f})"
    return score.task, f"{score.metric} {score.before:.4f} -> {score.after:.4f}{error}"


def _facts(source: str, found: Any) -> list[tuple[str, str]]:
    change = found.perplexity_after / found.perplexity_before - 1
    return [
        ("text", f"{source}, {found.tokens} predicted tokens"),
        ("mean KL", f"{found.kl:.3e} nats (original || patched)"),
        ("top-1 agreement", f"{found.top1:.2%}"),
        ("perplexity", f"{found.perplexity_before:.4f} -> {found.perplexity_after:.4f} ({change:+.2%})"),
    ]
