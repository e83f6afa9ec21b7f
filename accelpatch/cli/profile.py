"""``accelpatch profile``: where the time of a token goes, and what limits each kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelpatch.errors import AccelpatchError

from . import console, options, profile_counters, profile_files
from . import prompt as prompts
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption

if TYPE_CHECKING:
    from accelpatch.profiling.run import Profile

commands = typer.Typer(help="Show where the time of a token goes, and what limits each kernel.", no_args_is_help=True)
PAGE, ORIGINAL, PATCHED = "profile.html", "original", "patched"
PromptOption = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the prompt in tokens.")]
NewOption = Annotated[int, typer.Option("--new-tokens", min=4, help="Tokens to generate; most of them are profiled.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Sequences generated at once.")]
RandomOption = Annotated[
    bool, typer.Option("--random-weights", help="Build the model with random weights; load no checkpoint.")
]


@commands.callback()
def profile() -> None:
    """Show where the time of a token goes, and what limits each kernel."""


@commands.command("trace")
def trace(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    compare: Annotated[bool, typer.Option("--compare", help="Record the original too, and show both.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for the page and the traces.")
    ] = Path("profile"),
    prompt_tokens: PromptOption = 32,
    new_tokens: NewOption = 16,
    batch: BatchOption = 1,
    random_weights: RandomOption = False,
    verify: options.VerifyOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Record MODEL's generate(): a trace for Perfetto, and a page with times by kernel, by operation and by layer."""
    from accelpatch.checkpoints import target

    target.check_folder(out)
    network, shape = _opened(model, recipe, plugin, (prompt_tokens, new_tokens, batch), random_weights, dtype, device)
    sides: list[tuple[str, Profile]] = []
    if compare:
        sides.append((ORIGINAL, _recorded(network, shape, ORIGINAL)))
    options.patch(network, recipe=recipe, verify=verify)
    sides.append((f"{PATCHED}, {recipe}", _recorded(network, shape, f"{PATCHED} model")))
    document = {"model": model, "recipe": recipe, "setting": _setting(network, shape)}
    document |= _write(out, document, sides)
    console.print_result(json, document, _facts(document, sides))


def _write(out: Path, document: dict[str, Any], sides: list[tuple[str, Profile]]) -> dict[str, Any]:
    """Write page and traces; returns their paths and the figures, for the JSON document."""
    from accelpatch.profiling.page import page

    out.mkdir(parents=True, exist_ok=True)
    summaries = [(name, one.summary) for name, one in sides]
    (out / PAGE).write_text(page(document["model"], document["setting"], summaries), encoding="utf-8")
    traces, figures = dict[str, str](), dict[str, Any]()
    for name, one in sides:
        side = name.partition(",")[0]
        one.write(out / f"{side}.json")
        traces[side], figures[side] = str(out / f"{side}.json"), one.summary.to_dict()
    return {"page": str(out / PAGE), "traces": traces, **figures}


def _opened(
    model: str, recipe: str, plugin: list[Path] | None, sizes: tuple[int, int, int], random_weights: bool, dtype: str,
    device: str,
) -> tuple[Any, Any]:  # fmt: skip
    """The original model and the Shape. sizes: tokens of the prompt, new tokens, batch."""
    from accelpatch.models import precheck

    prompt, new, batch = sizes
    limit = precheck.context_length(options.check_original(model, fetched=not random_weights))
    if limit is not None and prompt + new > limit:
        raise AccelpatchError(f"--prompt-tokens and --new-tokens are {prompt + new}, more than the context of {limit}")
    options.prepare(recipe, plugin)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported; else its profiler prints messages
    from accelpatch import api
    from accelpatch.bench.generate import Shape

    if random_weights:
        network = api.random_model(model, dtype=dtype, device=options.torch_device(device))
    else:
        network = options.open_model(model, dtype, device).model
    prompts.check_fits(network, prompt, new)
    return network, Shape(batch, prompt, new)


def _recorded(network: Any, shape: Any, name: str) -> Profile:
    from accelpatch.profiling.run import record

    return record(network, shape, progress=lambda said: console.note(f"{name}: {said}"))


def _setting(network: Any, shape: Any) -> str:
    import torch

    from accelpatch.device import probe

    one = next(network.parameters())
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if one.device.type == "cpu" else ""
    return (
        f"{probe(one.device).name}{threads}, {str(one.dtype).removeprefix('torch.')}, torch {torch.__version__}; batch "
        f"{shape.batch}, {shape.prompt} prompt tokens, {shape.new} new tokens; times are of one decode step"
    )


def _facts(document: dict[str, Any], sides: list[tuple[str, Profile]]) -> list[tuple[str, str]]:
    from accelpatch.profiling.counters import plain

    facts = [("setting", document["setting"])]
    for name, profiled in sides:
        one = profiled.summary
        waits = f", waits {one.waited:,.0f}" if one.device != "cpu" else ""
        facts.append((
            name,
            f"{one.unprofiled:,.0f} us a step; recorded {one.recorded:,.0f} us ({one.cost:+.1%}): ran {one.busy:,.0f}, "
            f"gaps {one.gaps:,.0f}{waits}; {one.launches:,.0f} launches a token, {one.named:.0%} of "
            f"{one.kernels:,.0f} named",
        ))  # fmt: skip
        facts += [
            ("", f"{row.microseconds:>10,.0f} us  {row.share:>6.1%}  {plain(row.name, 80)}")
            for row in one.by_operation[:6]
        ]
    facts += [("page", document["page"])]
    facts += [("trace", f"{file} (open it at https://ui.perfetto.dev)") for file in document["traces"].values()]
    return facts


@commands.command("roofline")
def roofline(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    prompt_tokens: PromptOption = 32,
    new_tokens: NewOption = 16,
    batch: BatchOption = 1,
    random_weights: RandomOption = False,
    verify: options.VerifyOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also draw it, such as roofline.png.")
    ] = None,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Show every operation of a decode step of MODEL: bytes, time, and shares of the read limit and of the peak."""
    from accelpatch.bench import plot as plots
    from accelpatch.checkpoints import target

    if plot:
        plots.check(plot)
        target.check_file(plot)
    network, shape = _opened(model, recipe, plugin, (prompt_tokens, new_tokens, batch), random_weights, dtype, device)
    from accelpatch.bench.read_limit import read_limit
    from accelpatch.profiling import roofline as rooflines

    one = next(network.parameters())
    limit, most = read_limit(one.device), rooflines.peak(one.dtype, one.device)
    options.patch(network, recipe=recipe, verify=verify)
    found = rooflines.roofline(_recorded(network, shape, "patched model"), limit, most, one.dtype)
    title = f"{model}, recipe {recipe}: {_setting(network, shape)}"
    if json:
        console.print_json({"model": model, "recipe": recipe, "setting": _setting(network, shape)} | found.to_dict())
    else:
        print(f"{title}\n\n{rooflines.text(found)}")
    if plot:
        rooflines.draw(found, title.replace("; ", "\n"), plot)
        console.note(f"drawn: {plot}")


commands.command("kernels")(profile_files.kernels)
commands.command("counters")(profile_counters.counters)
