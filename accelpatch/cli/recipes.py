"""``accelpatch recipes``: list the bundled recipes, or print one with everything that it extends merged in."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console
from .options import JsonOption

commands = typer.Typer(help="List the bundled recipes, or show one.", invoke_without_command=True)


@commands.callback()
def list_recipes(context: typer.Context, json: JsonOption = False) -> None:
    """List the bundled recipes, or show one."""
    if context.invoked_subcommand is not None:
        return
    from accelpatch.recipe import recipe

    found = [recipe.load(name) for name in recipe.bundled()]
    document = [{"name": item.name, "description": item.description} for item in found]
    console.print_result(json, document, ((item.name, item.description.strip()) for item in found))


@commands.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Name of a bundled recipe, or a YAML file.")],
) -> None:
    """Print a recipe as YAML, with everything that it extends merged in."""
    from accelpatch.recipe import recipe

    print(recipe.dump(recipe.load(name)), end="")
