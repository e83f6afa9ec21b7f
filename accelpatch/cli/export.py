"""``accelpatch export``: write a saved patched model in a format that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import console
from .options import JsonOption

Formats = Literal["compressed-tensors", "gptq", "awq", "fp8", "gguf"]


def export(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder that `accelpatch quantize` wrote.")],
    to: Annotated[
        Formats,
        typer.Option("--to", help="A format that vLLM, SGLang, transformers or llama.cpp read without accelpatch."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="New folder; default: DIR with the format in its name."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file, such as 2GB.")] = "5GB",
    json: JsonOption = False,
) -> None:
    """Write the patched model in DIR in a format of other programs; an error says why if that is not possible."""
    from accelpatch.checkpoints import target
    from accelpatch.models import precheck

    target.shard_size(max_shard_size)
    precheck.check(folder)
    if Path(folder).is_dir():
        target.own_config(Path(folder))
    if out is not None:
        target.check_folder(out)
        target.check_empty(out)
    console.quiet_transformers()
    from accelpatch import api
    from accelpatch.report import human

    with console.progress_bars() as progress:
        made = api.export(folder, to, out, max_shard_size=max_shard_size, progress=progress)
    facts = [("format", made.format), ("quantised", f"{made.layers} linear layers"), ("weights", human(made.size))]
    facts += [("folder", str(made.folder)), *(("note", text) for text in made.notes)]
    console.print_result(json, made.to_dict(), facts)
