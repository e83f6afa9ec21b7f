"""``accelpatch exec``: run a Python script unedited, with every model that it loads patched on first use."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import console, options
from .options import PluginOption, RecipeOption

# Everything after the script's name is passed to the script, even if it looks like one of our options.
CONTEXT = {"allow_interspersed_args": False}


class ScriptCommand(TyperCommand):
    """Stops parsing accelpatch's options after ``-m MODULE``, as python does with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with_value = {
            name
            for param in self.params
            if not getattr(param, "is_flag", False)
            for name in param.opts
            if name[0] == "-"
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--"):
            if args[place] == "-m":
                args = [*args[: place + 2], "--", *args[place + 2 :]]
                break
            place += 2 if args[place] in with_value else 1
        return super().parse_args(ctx, args)


def execute(
    script: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.")
    ] = None,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module like python -m.")] = None,
    verify: options.VerifyOption = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary on stderr.")] = False,
    plugin: PluginOption = None,
) -> None:
    """Run a Python script unchanged; each transformers model in it is patched at its first forward or generate.

    That is the first one in eval mode. A model that cannot be patched stays as it is. A patched model is unpatched when
    the script trains, saves or resizes it, or lists its parameters. The summary says which models were patched, and why
    others were not.
    """
    words = script or []
    if module is None and not words:
        raise typer.BadParameter("give a script, or -m MODULE", param_hint="SCRIPT")
    if module is None and not Path(words[0]).is_file():
        raise typer.BadParameter(f"there is no file {words[0]}", param_hint="SCRIPT")
    options.check_replacers(recipe, plugin)
    options.load_plugins(plugin)
    from accelpatch import api

    from . import script as scripts

    outcomes = Outcomes()
    try:
        with api.patch_on_first_use(recipe, on_patched=outcomes.patched, on_left=outcomes.left, verify=verify):
            scripts.run(words if module is None else [module, *words], as_module=module is not None)
    finally:
        if not quiet:
            console.note(f"accelpatch: {outcomes}")


class Outcomes:
    """A line for each model of a script: how it was patched, or why it was not; in the order of these events."""

    def __init__(self) -> None:
        self._lines: list[tuple[Any, str]] = []  # a weak reference to the model, and its line

    def left(self, model: Any, reason: str) -> None:
        """Add a model that stays unpatched, or was unpatched, and why."""
        self._lines.append((weakref.ref(model), f"{type(model).__name__} {reason}"))

    def patched(self, model: Any) -> None:
        """Add a model that was patched; earlier lines about it are dropped."""
        self._lines = [(ref, line) for ref, line in self._lines if ref() is not model]
        self._lines.append((weakref.ref(model), _line(model)))

    def __str__(self) -> str:
        return "; ".join(line for _, line in self._lines) or "the script used no model that could be patched"


def _line(model: Any) -> str:
    from accelpatch.report import human

    report = model.accelpatch.report()
    before, after = report.token_bytes
    if nothing := report.why_nothing():
        return nothing
    return (
        f"{report.model} patched with {report.recipe}: {report.replaced} of {len(report.sites)} sites, "
        f"{human(before)} -> {human(after)} a token"
    )
