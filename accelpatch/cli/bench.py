"""``accelpatch bench``: prefill and decode speed of generate(), original and patched, and the memory read limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption

if TYPE_CHECKING:
    from torch import nn

    from accelpatch.bench.generate import Shape


def bench(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt in tokens.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per sequence.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch size: sequences generated at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions; the median is reported.")] = 5,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Build the model with random weights; load no checkpoint.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also save a bar chart, such as speed.png.")
    ] = None,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed of MODEL before and after patching. The patched model is verified first."""
    from accelpatch.bench import plot as plots

    if plot:
        plots.check(plot)
    options.prepare(recipe, plugin)
    from accelpatch.bench import record as records
    from accelpatch.bench.generate import Shape

    network: Any = (
        _random(model, dtype, device) if random_weights else options.open_model(model, dtype, device)[0].model
    )
    weights = "random" if random_weights else "checkpoint"
    record = _measure(network, model, recipe, Shape(batch, prompt_tokens, new_tokens), repeats, weights, json)
    if json:
        console.print_json(record)
    else:
        print(records.text(record))
    if plot:
        plots.draw(record, plot)
        console.note(f"drawn: {plot}")


def _random(name: str, dtype: str, device: str) -> nn.Module:
    from accelpatch import api

    return api.random_model(name, dtype=dtype, device=options.torch_device(device))


def _measure(
    network: Any, name: str, recipe: str, shape: Shape, repeats: int, weights: str, json: bool
) -> dict[str, Any]:
    """Measure the original, the read limit and, after a verified patch, the patched model; returns the record."""
    import torch

    from accelpatch import api
    from accelpatch.bench import record
    from accelpatch.bench.generate import cached_bytes, measure_generate
    from accelpatch.bench.read_limit import read_limit
    from accelpatch.device import probe

    from .prompt import check_fits
    from .run import verification_facts

    check_fits(network, shape.prompt, shape.new)
    parameter = next(network.parameters())
    where, dtype = parameter.device, str(parameter.dtype).removeprefix("torch.")
    console.note("measuring the original")
    original = measure_generate(network, shape, repeats=repeats)
    limit, cached = read_limit(where), cached_bytes(network)
    with console.progress_bars() as progress:
        api.patch(network, recipe, keep_original="none", progress=progress)
    report = network.accelpatch.report()
    if not json:
        console.print_facts(verification_facts(report))
    console.note("measuring the patched model")
    patched = measure_generate(network, shape, repeats=repeats)
    setting = record.Setting(
        name, weights, dtype, probe(where), torch.get_num_threads(), shape, repeats, record.command_line(sys.argv[1:])
    )
    return record.document(setting, report, limit, original, patched, cached)
