"""``accelpatch serve``: serves a patched model by OpenAI's HTTP API, with transformers, vLLM or SGLang."""

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
MaxRequestsOption = Annotated[int, typer.Option(min=1, help="Most open requests, including waiting ones.")]
MaxPromptOption = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt in tokens; default: the model's context.")
]
MaxNewOption = Annotated[int, typer.Option(min=1, help="Most tokens that a request may ask for.")]
MaxSecondsOption = Annotated[
    float, typer.Option(min=0.1, help="Time limit of a request, from arrival to its last token.")
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ENGINE OPTIONS]", help="Options that are passed on to vLLM or SGLang."),
]


def serve(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: options.OwnRecipeOption = None,
    engine: Annotated[
        Engine, typer.Option(help="auto: vLLM or SGLang if one can serve MODEL, else transformers.")
    ] = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a key.")
    ] = "127.0.0.1",
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
    engine_options: EngineOptions = None,
) -> None:
    """Serve MODEL, patched with a recipe, over HTTP as OpenAI's API has it: chat completions, completions, responses.

    Ctrl-C or SIGTERM ends it when the requests that it accepted are answered.
    """
    from accelpatch.serving.limits import Address, Limits

    words = engine_options or []
    if model.startswith("-"):  # MODEL was left out, so that the first engine option is in its place
        model, words = options.DEFAULT_MODEL, [model, *words]
    options.check_generation(model, recipe, 1)
    address = Address(host, port, api_key)
    address.check()
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    served = serve_engine.Served(model, recipe, dtype, device, statistics, verify, words)
    name = serve_engine.choose(served) if engine == "auto" else engine
    if name != "transformers":
        serve_engine.start(name, served, address)
        return
    _serve(served, address, Limits(max_requests, max_prompt_tokens, max_new_tokens, max_seconds))


def _serve(served: serve_engine.Served, address: Address, limits: Limits) -> None:
    """Serve with transformers. The port is bound and the memory is checked before the model is loaded."""
    from accelpatch.serving import server

    if served.engine_options:
        raise ServingError(
            f"{' '.join(served.engine_options)}: --engine transformers takes no options after --; `--help` lists its own"
        )
    server.check_installed()
    with server.bound(address) as where:
        _check_fits(served)
        load = partial(
            options.open_patched, served.model, recipe=served.recipe, dtype=served.dtype, device=served.device,
            statistics=served.statistics, verify=served.verify,
        )  # fmt: skip
        server.serve(where, served.model, load, limits, address, _started(served.model))


def _started(model: str) -> Any:
    return lambda url: console.note(f"serving {model} at {url}/v1; the model's name in requests is {model}")


def _check_fits(served: serve_engine.Served) -> None:
    """Raise ServingError if the plan's weights and cache do not fit the memory."""
    from accelpatch import api
    from accelpatch import device as devices
    from accelpatch.models import catalog
    from accelpatch.report import human

    if api.is_patched(served.model):
        return
    device = devices.probe(options.torch_device(served.device))
    arch = device.arch if device.kind == "cuda" and device.arch in devices.KNOWN else None
    default = "gguf" if catalog.resolve(served.model).kind == "gguf" else options.DEFAULT_RECIPE
    planned = api.plan_from_config(served.model, served.recipe or default, arch=arch)
    needed = planned.resident_bytes + planned.cache_bytes
    if needed > device.memory:
        raise ServingError(
            f"{served.model} needs {human(needed)} with this recipe, and {device.name} has {human(device.memory)}: "
            "take a recipe with fewer bits, or a smaller model"
        )
