"""``--tp N``: a command starts itself once a rank; rank 0 prints, the others compute with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

TensorParallelOption = Annotated[
    int,
    typer.Option("--tp", min=1, metavar="N", help="Split the model among N processes: GPUs of this machine, or CPUs."),
]
PROMPT = "ACCELPATCH_PROMPT"  # what rank 0's parent read from stdin


def start(count: int, stdin: str | None, without: Mapping[str, Any]) -> None:
    """With `--tp` above 1, run this command once a rank, and leave; return in a rank, and where there are none.

    stdin: a prompt that was read from there. without: options that do not go with `--tp`, and their values: raises
    BadParameter for these, and PatchError for a rank that fails.
    """
    if count == 1:
        return
    for name, value in without.items():
        if value:
            raise typer.BadParameter(f"goes without {name}: ranks have parts of one patched model", param_hint="--tp")
    if "RANK" in os.environ:
        return
    from accelpatch.parallel import launch

    more = {} if stdin is None else {PROMPT: stdin}
    launch.run([*launch.this_program(), *sys.argv[1:]], count, more)
    raise typer.Exit


def argument(count: int) -> dict[str, Any]:
    """The argument of `load` and `patch`."""
    return {"parallel": "tp"} if count > 1 else {}


def prompt_of_parent() -> str | None:
    """The prompt that the process which started the ranks read from stdin; None where it read none."""
    return os.environ.get(PROMPT)
