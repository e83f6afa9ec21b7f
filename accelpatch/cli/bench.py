"""``accelpatch bench``: prefill and decode speed of generate(), original and patched, and the memory read limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelpatch.errors import AccelpatchError

from . import console, options
from . import draft as drafts
from . import prompt as prompts
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, RecipeOption

if TYPE_CHECKING:
    from accelpatch.bench.record import Setting


def bench(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: RecipeOption = options.DEFAULT_RECIPE,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt in tokens.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per sequence.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch size: sequences generated at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions at most; the median is reported.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Time for each of the two models: fewer repetitions, but one at least.")
    ] = 60.0,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Build the model with random weights; load no checkpoint.")
    ] = False,
    draft: drafts.DraftOption = None,
    verify: options.VerifyOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also save a bar chart, such as speed.png.")
    ] = None,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed of MODEL before and after patching. The patched model is verified first."""
    drafts.check(draft, {"--batch": batch > 1, "--plot": plot, "--random-weights": random_weights})
    _check(model, plot, prompt_tokens + new_tokens, random_weights)
    options.prepare(recipe, plugin)
    from accelpatch.bench.generate import Shape
    from accelpatch.bench.record import Setting

    network, shape = _network(model, dtype, device, random_weights), Shape(batch, prompt_tokens, new_tokens)
    prompts.check_fits(network, shape.prompt, shape.new)  # _check may have had no configuration
    setting = Setting.of(network, model, "random" if random_weights else "checkpoint", shape, repeats, seconds)
    given: Any = {"recipe": recipe, "verify": verify}
    assistant, patch = partial(drafts.opened, draft, network, dtype, device, given), partial(options.patch, **given)
    _show(_measure(network, setting, patch, assistant, json), plot, json)


def _show(record: dict[str, Any], plot: Path | None, json: bool) -> None:
    from accelpatch.bench import plot as plots
    from accelpatch.bench import record as records

    if json:
        console.print_json(record)
    else:
        print(records.text(record))
    if plot:
        plots.draw(record, plot)
        console.note(f"drawn: {plot}")


def _check(model: str, plot: Path | None, tokens: int, random_weights: bool) -> None:
    """Raise AccelpatchError for wrong arguments, before torch is imported."""
    from accelpatch.bench import plot as plots
    from accelpatch.checkpoints import target
    from accelpatch.models import precheck

    if plot:
        plots.check(plot)
        target.check_file(plot)
    source = options.check_original(model, fetched=not random_weights)
    limit = precheck.context_length(source)
    if limit is not None and tokens > limit:
        raise AccelpatchError(
            f"--prompt-tokens and --new-tokens are {tokens}, and the model's context of {limit} tokens is shorter"
        )


def _network(name: str, dtype: str, device: str, random_weights: bool) -> Any:
    from accelpatch import api

    if random_weights:
        return api.random_model(name, dtype=dtype, device=options.torch_device(device))
    return options.open_model(name, dtype, device).model


def _measure(
    network: Any, setting: Setting, patch: Callable[[Any], None], assistant: Callable[[], Any], json: bool
) -> dict[str, Any]:
    """Measure the original, the read limit and, after a verified patch, the patched model; returns the record.

    assistant: makes the draft model, with which the patched model is measured again, or returns None.
    """
    from accelpatch.bench import record
    from accelpatch.bench.generate import cached_bytes, measure_generate
    from accelpatch.bench.read_limit import read_limit

    from .run import verification_facts

    limits: dict[str, Any] = {"repeats": setting.repeats, "seconds": setting.seconds}
    with measuring("the original") as shown:
        original = measure_generate(network, setting.shape, **limits, progress=shown)
    limit, cached = read_limit(next(network.parameters()).device), cached_bytes(network)
    patch(network)
    report = network.accelpatch.report()
    if not json:
        console.print_facts(verification_facts(report))
    with measuring("the patched model") as shown:
        patched = measure_generate(network, setting.shape, **limits, progress=shown)
    if (drafting := assistant()) is None:
        return record.document(setting, report, limit, original, patched, cached)
    with measuring("the patched model with drafts") as shown:
        drafted = measure_generate(network, setting.shape, **limits, progress=shown, draft=drafting)
    return record.document(setting, report, limit, original, patched, cached, drafted)


@contextmanager
def measuring(what: str) -> Iterator[Callable[[int, int, float | None], None]]:
    """Context manager: yields the progress function of a measurement, which draws a bar on a terminal and prints once
    how long the measurement will take."""
    console.note(f"measuring {what}: warming up")
    announced = False
    with console.progress_bars() as bar:

        def shown(done: int, total: int, left: float | None) -> None:
            nonlocal announced
            if left and not announced:
                announced = True
                console.note(f"measuring {what}: {(total - done) // 2} repetitions, about {left:.0f} s")
            if bar is not None:
                bar(f"measuring {what}", done, total)

        yield shown
