"""``accelpatch inspect``: what a checkpoint is, from its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import console
from .options import JsonOption


def inspect(
    place: Annotated[Path, typer.Argument(metavar="DIR_OR_FILE", help="A checkpoint's folder, or one of its files.")],
    json: JsonOption = False,
) -> None:
    """Show a checkpoint's format, bits, groups, tied tensors and bytes, and what accelpatch would do with it."""
    from accelpatch.checkpoints import inspection
    from accelpatch.report import human

    found = inspection.inspect(place)
    facts = [("format", found.format), *found.facts.items()]
    facts += [(f"bytes, {kind}", f"{human(size)} in {count} tensors") for kind, (count, size) in found.kinds.items()]
    console.print_result(json, found.to_dict(), [*facts, ("accelpatch", found.advice)])
