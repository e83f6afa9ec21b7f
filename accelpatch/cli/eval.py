"""``accelpatch eval``: how far a patched model departs from the original on a text that the user gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import checks, console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption, StatisticsOption

CHAPTER = Path(__file__).with_name("alice.txt")
TITLE = "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter 1"  # in the public domain
ENOUGH = 1000  # predicted tokens: the standard error of an agreement of 70% is then 1.5%, and of 185 tokens 3.4%


def evaluate(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    text: Annotated[Path | None, options.file_option(help="UTF-8 text; default: a chapter of a novel.")] = None,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    statistics: StatisticsOption = None,
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

    from . import prompt as prompts

    loaded = options.open_model(model, dtype, device)
    ids = prompts.encode(prompts.tokenizer_of(loaded), words, chat=False, option="--text")[:, :max_tokens]
    if 1 < ids.shape[1] <= ENOUGH:
        console.warning(
            f"{source} has {ids.shape[1]} tokens, and figures of fewer than {ENOUGH} say little: give a "
            "longer text, or none"
        )
    with console.progress_bars() as progress:
        found = api.evaluate(
            loaded.model, recipe, ids.to(loaded.model.device), statistics=statistics, progress=progress
        )
    document = {"model": model, "recipe": recipe, "text": source} | found.to_dict()
    console.print_result(json, document, [("model", model), ("recipe", recipe), *_facts(source, found)])


def _facts(source: str, found: Any) -> list[tuple[str, str]]:
    change = found.perplexity_after / found.perplexity_before - 1
    return [
        ("text", f"{source}, {found.tokens} predicted tokens"),
        ("mean KL", f"{found.kl:.3e} nats (original || patched)"),
        ("top-1 agreement", f"{found.top1:.2%}"),
        ("perplexity", f"{found.perplexity_before:.4f} -> {found.perplexity_after:.4f} ({change:+.2%})"),
    ]
