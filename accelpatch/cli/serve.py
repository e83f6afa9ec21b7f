"""``accelpatch serve``: a patched model behind OpenAI's HTTP paths, by transformers, vLLM or SGLang."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accelpatch.errors import ServingError

from . import console, options, serve_engine
from .options import DeviceOption, DtypeOption, PluginOption, StatisticsOption

if TYPE_CHECKING:
    from accelpatch.serving.limits import Address, Limits

Engine = Literal["auto", "transformers", "vllm", "sglang"]
KeyOption = Annotated[
    str | None, typer.Option(envvar="ACCELPATCH_API_KEY", help="Key that requests must carry.", show_default=False)
]
MaxRequestsOption = Annotated[int, typer.Option(min=1, help="Requests open at once, with those that wait.")]
MaxPromptOption = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt in tokens; default: the model's context.")
]
MaxNewOption = Annotated[int, typer.Option(min=1, help="Most tokens that a request may ask for.")]
MaxSecondsOption = Annotated[float, typer.Option(min=0.1, help="Time of a request, from arrival to last token.")]
EngineWords = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ENGINE OPTIONS]", help="Go through to vLLM or SGLang.")
]


def serve(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: options.OwnRecipeOption = None,
    engine: Annotated[Engine, typer.Option(help="Who serves; auto: vLLM or SGLang where one can, else this.")] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8000,
    api_key: KeyOption = None,
    max_requests: MaxRequestsOption = 256,
    max_prompt_tokens: MaxPromptOption = None,
    max_new_tokens: MaxNewOption = 4096,
    max_seconds: MaxSecondsOption = 600.0,
    statistics: StatisticsOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verify: options.VerifyOption = "auto",
    plugin: PluginOption = None,
    engine_options: EngineWords = None,
) -> None:
    """Serve MODEL, patched with a recipe, over HTTP as OpenAI's API has it: chat completions, completions, responses.

    Ctrl-C or SIGTERM ends it when the requests that it accepted are answered.
    """
    from accelpatch.serving.limits import Address, Limits

    words = engine_options or []
    if model.startswith("-"):  # the first word after --
        model, words = options.DEFAULT_MODEL, [model, *words]
    options.check_generation(model, recipe, 1)
    address = Address(host, port, api_key)
    address.check()
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    wanted = serve_engine.Wanted(model, recipe, dtype, device, statistics, verify, words)
    taken = serve_engine.chosen(wanted) if engine == "auto" else engine
    if taken != "transformers":
        serve_engine.hand_over(taken, wanted, address)
        return
    _serve(wanted, address, Limits(max_requests, max_prompt_tokens, max_new_tokens, max_seconds))


def _serve(wanted: serve_engine.Wanted, address: Address, limits: Limits) -> None:
    """By transformers: the port is bound and the memory is asked about before the model is loaded."""
    from accelpatch.serving import server

    if wanted.words:
        raise ServingError(
            f"{' '.join(wanted.words)}: --engine transformers takes no options after --; `--help` lists its own"
        )
    server.check_installed()
    with server.bound(address) as where:
        _check_fits(wanted)
        load = partial(
            options.open_patched, wanted.model, recipe=wanted.recipe, dtype=wanted.dtype, device=wanted.device,
            statistics=wanted.statistics, verify=wanted.verify,
        )  # fmt: skip
        server.serve(where, wanted.model, load, limits, address, _started(wanted.model))


def _started(model: str) -> Any:
    return lambda url: console.note(f"serving {model} at {url}/v1; the model's name in requests is {model}")


def _check_fits(wanted: serve_engine.Wanted) -> None:
    """Raise ServingError for a model whose patched weights and cache do not fit the memory, as far as is planned."""
    from accelpatch import api
    from accelpatch import device as devices
    from accelpatch.models import catalog
    from accelpatch.report import human

    if api.is_patched(wanted.model):
        return
    device = devices.probe(options.torch_device(wanted.device))
    arch = device.arch if device.kind == "cuda" and device.arch in devices.KNOWN else None
    usual = "gguf" if catalog.resolve(wanted.model).kind == "gguf" else options.DEFAULT_RECIPE
    planned = api.plan_from_config(wanted.model, wanted.recipe or usual, arch=arch)
    needed = planned.resident_bytes + planned.cache_bytes
    if needed > device.memory:
        raise ServingError(
            f"{wanted.model} needs {human(needed)} with this recipe, and {device.name} has {human(device.memory)}: "
            "take a recipe with fewer bits, or a smaller model"
        )
