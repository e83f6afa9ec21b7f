"""The part of ``accelpatch serve`` that chooses and starts vLLM or SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelpatch.errors import AccelpatchError, ServingError

from . import console, facts, options

if TYPE_CHECKING:
    from accelpatch.serving.limits import Address


@dataclass(frozen=True)
class Served:
    """The model to serve, by the command's options. engine_options: those that are passed on to vLLM or SGLang."""

    model: str
    recipe: str | None
    dtype: str
    device: str
    statistics: Path | None
    verify: str
    engine_options: list[str]


def start(name: str, served: Served, address: Address) -> None:
    """Replace this process by an engine (exec). Raises ServingError if the engine cannot serve the model."""
    from accelpatch.serving import engines, server

    (package, version), ranks = engines.installed(name), engines.ranks_of(name, served.engine_options)
    server.bound(address).close()
    device, gpus = _device(served.device)
    exported = engines.described(_export(served))
    if reason := engines.why_not(exported, device, ranks, gpus):
        raise ServingError(f"{package} {version} cannot serve {served.model} here: {reason}")
    command = engines.command(name, package, exported, served.model, device, address, served.engine_options)
    console.note(f"{package} {version}: {' '.join(command[1:])}")
    engines.start(name, command, address)


def choose(served: Served) -> str:
    """The engine for `auto`: vLLM or SGLang if it is installed and can serve the model on a GPU of this machine, else
    transformers."""
    from accelpatch.serving import engines

    for name in engines.ENGINES:
        try:
            engines.installed(name)
        except ServingError:
            continue
        device, gpus = _device(served.device)
        if not gpus:
            break
        try:
            exported = engines.described(_export(served))
            reason = engines.why_not(exported, device, engines.ranks_of(name, served.engine_options), gpus)
        except AccelpatchError as error:
            reason = str(error)
        if reason is None:
            return name
        console.note(f"not by {name}: {reason}")
    return "transformers"


def _device(text: str) -> tuple[Any, int]:
    """The device, and the number of GPUs of this machine."""
    import torch

    from accelpatch import device as devices

    where = options.torch_device(text)
    return devices.probe(where), torch.cuda.device_count() if where.type == "cuda" else 0


def _export(served: Served) -> Path:
    """The folder of the model as compressed-tensors, from an earlier call with the same recipe and files or made now."""
    from accelpatch import api
    from accelpatch.models import precheck
    from accelpatch.recipe import recipe as recipes
    from accelpatch.serving import exported

    source = precheck.check(served.model)
    version = facts.version("accelpatch") or ""
    if precheck.is_quantised(source):
        files = _files(Path(source.location))
        name = exported.key(files, version)
        return exported.folder(name, None, lambda _, new: api.export(source.location, "compressed-tensors", new))
    recipe = recipes.load(served.recipe or options.DEFAULT_RECIPE)
    files = _files(exported.place(source))
    statistics = [] if served.statistics is None else [served.statistics]
    name = exported.key([*files, *statistics], version, source.name, recipes.dump(recipe), served.dtype)

    def quantize(folder: Path) -> None:
        with console.progress_bars() as progress:
            api.quantize(
                served.model, recipe, folder, dtype=served.dtype, device=options.torch_device(served.device),
                statistics=served.statistics, verify=served.verify, progress=progress,
            )  # fmt: skip

    return exported.folder(name, quantize, lambda saved, new: api.export(saved, "compressed-tensors", new))


def _files(place: Path | None) -> list[Path]:
    if place is None:
        return []
    return [place] if place.is_file() else [file for file in place.iterdir() if file.is_file()]
