"""``accelpatch bench serve``: measures a running server under the load of many users."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from . import console, options
from .options import JsonOption

NAME = "bench serve"
RateOption = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Mean requests a second, at random times; default: each user sends the next one after an answer.",
    ),
]
PromptsOption = Annotated[
    Path | None, options.file_option(help="JSON lines, each with prompt and max_tokens; default: random prompts.")
]
KeyOption = Annotated[
    str | None, typer.Option(envvar="ACCELPATCH_API_KEY", help="API key of the server.", show_default=False)
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also draw the times, such as load.png.")
]


def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    users: Annotated[int, typer.Option(min=1, help="Users: requests that are open at once.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100,
    rate: RateOption = None,
    prompt_words: Annotated[
        str, typer.Option(metavar="N|N-M", help="Words of a prompt, drawn from a range.")
    ] = "16-64",
    new_tokens: Annotated[str, typer.Option(metavar="N|N-M", help="Tokens to ask for, drawn from a range.")] = "16-64",
    prompts: PromptsOption = None,
    model: Annotated[str | None, typer.Option(help="Name of the model; default: the server's first.")] = None,
    api_key: KeyOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Ask for completions of the prompts, not for chat.")] = False,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Temperature of the answers; 0: greedy.")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time after which a request counts as failed.")] = 600.0,
    seed: options.SeedOption = 0,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a server under a load: time to the first token, time a token, throughput and failures. It may be any that
    speaks OpenAI's API. The exit status is 1 where a request failed."""
    from accelpatch.serving import load, load_record, server

    words, tokens = _range(prompt_words, "--prompt-words"), _range(new_tokens, "--new-tokens")
    server.check_installed(("openai",))
    _check_plot(plot)
    base = url.rstrip("/").removesuffix("/v1")
    if not re.match(r"https?://[^/]", base):
        raise typer.BadParameter(f"{url!r} is no URL such as http://127.0.0.1:8000", param_hint="URL")
    wanted = load.from_file(prompts, requests, tokens[1]) if prompts else load.drawn(requests, words, tokens, seed)
    plan = load.Load(base, model or load.model_of(base, api_key), users, rate, api_key, not raw, seconds, temperature)
    with console.progress_bars() as bar:
        answers = load.run(plan, wanted, seed, bar)
    found = load_record.record(plan, answers)
    console.print_result(json, found, load_record.facts(found))
    if plot:
        load_record.draw(found, plot)
        console.note(f"drawn: {plot}")
    if found["failures"]:
        raise typer.Exit(1)


def _range(text: str, name: str) -> tuple[int, int]:
    """(N, N) for N, (N, M) for N-M. Raises BadParameter for other text."""
    matched = re.fullmatch(r"([1-9][0-9]{0,6})(?:-([1-9][0-9]{0,6}))?", text)
    low, high = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
    if low > high:
        raise typer.BadParameter(f"{text!r} is no length such as 64, and no range such as 16-64", param_hint=name)
    return low, high


def _check_plot(plot: Path | None) -> None:
    from accelpatch.bench import plot as plots
    from accelpatch.checkpoints import target

    if plot:
        plots.check(plot)
        target.check_file(plot)
