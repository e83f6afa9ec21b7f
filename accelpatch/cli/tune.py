"""``accelpatch tune``: measure on this machine which implementation is the fastest, and remember it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import console, options, tune_auto, tune_gemms, tune_hipblaslt, tune_kernels
from .options import DeviceOption, JsonOption

if TYPE_CHECKING:
    from accelpatch.tuning.attention import Measured

commands = typer.Typer(help="Measure on this machine which implementations are the fastest.", no_args_is_help=True)
LENGTHS, ON_CPU, SIZES = "512,2048,8192,32768", "512,2048", "64,128"


@commands.callback()
def tune() -> None:
    """Measure on this machine which implementations are the fastest."""


commands.command("auto")(tune_auto.auto)
commands.command("trial")(tune_auto.trial)
commands.command("kernels")(tune_kernels.kernels)
commands.command("tunableop")(tune_gemms.tunableop)
commands.add_typer(tune_hipblaslt.commands, name="hipblaslt")


@commands.command("attention")
def attention(
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Of q, k and v; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto",
    lengths: Annotated[
        str,
        typer.Option("--lengths", metavar="N,N,...", help="Lengths of prompts in tokens; default on a CPU: 512,2048."),
    ] = LENGTHS,
    sizes: Annotated[str, typer.Option("--sizes", metavar="D,D,...", help="Sizes of a head.")] = SIZES,
    heads: Annotated[int, typer.Option("--heads", metavar="N", min=1, help="Heads of q.")] = 32,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", metavar="N", min=1, help="Heads of k and v; default: those of q.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table, and store nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Time every implementation of attention; later patches choose by the order that is stored in the cache folder."""
    for text, option in ((lengths, "--lengths"), (sizes, "--sizes")):
        options.numbers(text, option)
    where = options.torch_device(device)
    import torch

    from accelpatch import api
    from accelpatch import device as devices

    cpu = where.type == "cpu"
    name = dtype if dtype != "auto" else "float32" if cpu else "bfloat16"
    wanted = options.numbers(ON_CPU if cpu and lengths == LENGTHS else lengths, "--lengths")
    with console.progress_bars() as progress:
        found = api.tune_attention(
            devices.probe(str(where)), dtype=getattr(torch, name), sizes=options.numbers(sizes, "--sizes"),
            lengths=wanted, heads=heads, kv_heads=kv_heads, store=not dry_run, progress=progress,
        )  # fmt: skip
    if json:
        console.print_json([one.to_dict() for one in found])
        return
    _print(found)
    print("nothing is stored (--dry-run)" if dry_run else "stored; `accelpatch cache clear attention` forgets it")


def _print(found: list[Measured]) -> None:
    from accelpatch.report import table

    names = list(dict.fromkeys(name for one in found for name in one.order))
    rows: list[tuple[str, ...]] = [("TFLOP/s", "head", "length", "batch", *names, "best")]
    for one in found:
        rates = [f"{one.flop / one.seconds[name] / 1e12:.3g}" if name in one.seconds else "" for name in names]
        kind = "causal" if one.causal else "full"
        best = one.order[0] if one.order else "none"
        rows.append((kind, str(one.size), str(one.length), str(one.batch), *rates, best))
    print(table(rows))
    reasons = {(name, reason): None for one in found for name, reason in one.refused.items()}
    for name, reason in reasons:
        print(f"not run: {name}: {reason}")
