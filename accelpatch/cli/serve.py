"""``accelpatch serve``: a patched model behind OpenAI's HTTP paths, by transformers, vLLM or SGLang."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from . import console, options
from .options import DeviceOption, DtypeOption, PluginOption, StatisticsOption

Engine = Literal["auto", "transformers", "vllm", "sglang"]


def serve(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: options.OwnRecipeOption = None,
    engine: Annotated[Engine, typer.Option(help="Who serves; auto: vLLM or SGLang where one can, else this.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="ACCELPATCH_API_KEY", help="Key that requests must carry.", show_default=False)
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests open at once, with those that wait.")] = 256,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt in tokens; default: the model's context.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens that a request may ask for.")] = 4096,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="Time of a request, from arrival to last token.")] = 600.0,
    statistics: StatisticsOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verify: options.VerifyOption = "auto",
    plugin: PluginOption = None,
) -> None:
    """Serve MODEL, patched with a recipe, over HTTP as OpenAI's API has it: chat completions, completions, responses.

    Ctrl-C or SIGTERM ends it when the requests that it accepted are answered. What follows -- is for the engine.
    """
    from accelpatch.serving import server
    from accelpatch.serving.limits import Address, Limits

    server.check_installed()
    options.check_generation(model, recipe, 1)
    address = Address(host, port, api_key)
    limits = Limits(max_requests, max_prompt_tokens, max_new_tokens, max_seconds)
    with server.bound(address) as where:
        options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
        _check_fits(model, recipe, device)
        load = partial(
            options.open_patched, model, recipe=recipe, dtype=dtype, device=device, statistics=statistics,
            verify=verify,
        )  # fmt: skip
        server.serve(where, model, load, limits, address, lambda url: console.note(f"serving {model} at {url}/v1"))


def _check_fits(model: str, recipe: str | None, device: str) -> None:
    pass
