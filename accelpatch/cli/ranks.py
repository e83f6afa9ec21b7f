"""``--tp N``: a command starts itself as N processes (ranks); rank 0 prints, the others compute with it."""

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
PROMPT = "ACCELPATCH_PROMPT"  # the ranks' environment variable with the prompt that their parent read from stdin


def start(count: int, stdin: str | None, conflicting: Mapping[str, Any]) -> None:
    """With `--tp` above 1, run this command once a rank and exit. Return if this process is a rank, or `count` is 1.

    stdin: the prompt that was read from stdin, or None. conflicting: name and value of options that cannot be combined
    with `--tp`. Raises BadParameter if one of these is given, and PatchError for a rank that fails.
    """
    if count == 1:
        return
    for name, value in conflicting.items():
        if value:
            raise typer.BadParameter(f"goes without {name}: ranks have parts of one patched model", param_hint="--tp")
    if "RANK" in os.environ:
        return
    from accelpatch.parallel import launch

    more = {} if stdin is None else {PROMPT: stdin}
    launch.run([*launch.this_program(), *sys.argv[1:]], count, more)
    raise typer.Exit


def argument(count: int) -> dict[str, Any]:
    """The keyword argument of `load` and `patch` for so many ranks."""
    return {"parallel": "tp"} if count > 1 else {}


def prompt_of_parent() -> str | None:
    """The prompt that the process which started the ranks read from stdin; None where it read none."""
    return os.environ.get(PROMPT)
