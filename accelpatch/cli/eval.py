"""``accelpatch eval``: how far a patched model departs from the original on a text that the user gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption, StatisticsOption


def evaluate(
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, metavar="FILE", help="UTF-8 text to evaluate on.")],
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    statistics: StatisticsOption = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Use at most this many tokens of the text.")] = 4096,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Compare MODEL before and after patching on a text: KL divergence, top-1 agreement and perplexity."""
    options.prepare(recipe, plugin)
    words = _read(text)
    from accelpatch import api

    from . import prompt as prompts

    loaded, where = options.open_model(model, dtype, device)
    ids = prompts.encode(prompts.tokenizer_of(loaded), words, chat=False, option="--text")[:, :max_tokens]
    with console.progress_bars() as progress:
        found = api.evaluate(loaded.model, recipe, ids.to(where), statistics=statistics, progress=progress)
    if json:
        console.print_json({"model": model, "recipe": recipe, "text": str(text)} | found.to_dict())
        return
    change = found.perplexity_after / found.perplexity_before - 1
    console.print_facts(
        [
            ("model", model),
            ("recipe", recipe),
            ("text", f"{text}, {found.tokens} predicted tokens"),
            ("mean KL", f"{found.kl:.3e} nats (original || patched)"),
            ("top-1 agreement", f"{found.top1:.2%}"),
            ("perplexity", f"{found.perplexity_before:.4f} -> {found.perplexity_after:.4f} ({change:+.2%})"),
        ]
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AccelpatchError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
