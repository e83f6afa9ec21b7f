"""``accelpatch calibrate``: statistics of a model's activations on a text, for recipes such as smoothquant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import checks, console, options
from .options import DeviceOption, DtypeOption, JsonOption


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write, in safetensors.")],
    model: options.ModelArgument = options.DEFAULT_MODEL,
    data: Annotated[Path | None, options.file_option(help="UTF-8 text; default: the model's own.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Use at most this many windows of the text.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a window.")] = 256,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Run a text through MODEL and write statistics of each linear layer's input, for `--statistics`."""
    from accelpatch.checkpoints import target

    options.check_original(model)
    if data is not None:
        checks.text_of(data)
    target.check_file(out)
    console.quiet_transformers()
    from accelpatch import api

    loaded = options.open_model(model, dtype, device)
    with console.progress_bars() as progress:
        found = api.calibrate(
            loaded.model, data, tokenizer=loaded.tokenizer, samples=samples, length=length, progress=progress
        )
    api.save_statistics(found, out)
    document = {"model": model, "file": str(out), "tokens": found.tokens, "sites": len(found.sites)}
    facts = [
        ("model", model),
        ("text", "written by the model" if data is None else str(data)),
        ("tokens", str(found.tokens)),
        ("linear layers", str(len(found.sites))),
        ("statistics", f"{out}: accelpatch run {model} --recipe smoothquant --statistics {out}"),
    ]
    console.print_result(json, document, facts)
