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


def to_start(count: int, without: Mapping[str, Any]) -> bool:
    """Whether this process has to start the ranks. without: options that do not go with `--tp`, and their values.

    Raises BadParameter for these.
    """
    if count == 1:
        return False
    for name, value in without.items():
        if value:
            raise typer.BadParameter(
                f"goes without {name}: the ranks have parts of one patched model", param_hint="--tp"
            )
    return "RANK" not in os.environ


def start(count: int, stdin: str | None) -> None:
    """Run this command once a rank. stdin: a prompt that was read from there. Raises PatchError for one that fails."""
    from accelpatch.parallel import launch

    more = {} if stdin is None else {PROMPT: stdin}
    launch.run([*launch.this_program(), *sys.argv[1:]], count, more)


def prompt_of_parent() -> str | None:
    """The prompt that the process which started the ranks read from stdin; None where it read none."""
    return os.environ.get(PROMPT)
