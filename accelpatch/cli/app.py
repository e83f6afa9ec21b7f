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
    bench_kernel,
    bench_serve,
    build,
    cache,
    calibrate,
    chat,
    doctor,
    eval,
    exec,
    export,
    finetune,
    inspect,
    merge,
    plan,
    profile,
    quantize,
    recipes,
    run,
    selftest,
    serve,
    tune,
)
from .console import print_error


class Commands(TyperGroup):
    """Shows the errors that a user can cause as one line with an exit status; bugs keep their traceback.

    `bench kernel` and `bench serve` are commands whose names have two words; any other word after `bench` is a model.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if " ".join(args[:2]) in (bench_kernel.NAME, bench_serve.NAME):
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)

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
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":  # torch's
                raise
            print_error(
                f"out of memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}; "
                "`accelpatch plan MODEL` shows how much memory the model needs"
            )
        raise typer.Exit(1)


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


for command in (
    run.run, chat.chat, plan.plan, calibrate.calibrate, quantize.quantize, export.export, inspect.inspect,
    eval.evaluate, finetune.finetune, merge.merge, serve.serve, bench.bench, build.build, selftest.selftest,
):  # fmt: skip
    app.command("eval" if command is eval.evaluate else command.__name__)(command)
app.command(bench_kernel.NAME)(bench_kernel.bench_kernel)
app.command(bench_serve.NAME)(bench_serve.bench_serve)
for name, group in {"recipes": recipes, "tune": tune, "profile": profile, "doctor": doctor, "cache": cache}.items():
    app.add_typer(group.commands, name=name)
app.command("exec", cls=exec.ScriptCommand, context_settings=exec.CONTEXT)(exec.execute)
