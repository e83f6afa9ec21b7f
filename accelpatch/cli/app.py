"""The typer application: the list of commands, and how their exceptions become messages and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from accelpatch.errors import AccelpatchError

from . import (
    bench,
    build,
    cache,
    calibrate,
    chat,
    doctor,
    eval,
    exec,
    export,
    inspect,
    plan,
    quantize,
    recipes,
    run,
    selftest,
    tune,
)
from .console import print_error


class Commands(TyperGroup):
    """Shows the errors that a user can cause as one line with an exit status; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AccelpatchError as error:
            print_error(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of a pipe went away; the interpreter must not complain about it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            print_error(
                f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}; "
                "`accelpatch plan MODEL` shows how much memory the model needs"
            )
        raise typer.Exit(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is Python's or torch's out-of-memory error (without importing torch to find out)."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def show_version(wanted: bool) -> None:
    if wanted:
        from accelpatch.cli import facts

        typer.echo(f"accelpatch {facts.version('accelpatch')}")
        raise typer.Exit()


app = typer.Typer(
    cls=Commands,
    name="accelpatch",
    help="Make a Hugging Face transformer faster: a recipe says which modules to replace; each is verified first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def accelpatch(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Print the version."),
) -> None:
    """Make a Hugging Face transformer faster: a recipe says which modules to replace; each is verified first."""


app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("plan")(plan.plan)
app.command("calibrate")(calibrate.calibrate)
app.command("quantize")(quantize.quantize)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.add_typer(recipes.commands, name="recipes")
app.command("eval")(eval.evaluate)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("build")(build.build)
app.command("selftest")(selftest.selftest)
app.add_typer(tune.commands, name="tune")
app.add_typer(cache.commands, name="cache")
app.command("exec", cls=exec.ScriptCommand, context_settings=exec.CONTEXT)(exec.execute)
