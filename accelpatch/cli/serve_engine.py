"""The part of ``accelpatch serve`` that hands over to vLLM or SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelpatch.errors import AccelpatchError, ServingError

from . import console, facts, options

if TYPE_CHECKING:
    from accelpatch.serving.limits import Address


@dataclass(frozen=True)
class Wanted:
    """What is to be served, as the options say. words: those that go through to the engine."""

    model: str
    recipe: str | None
    dtype: str
    device: str
    statistics: Path | None
    verify: str
    words: list[str]


def hand_over(name: str, wanted: Wanted, address: Address) -> None:
    """Start an engine in this process's place. Raises ServingError with the reason where it cannot serve the model."""
    from accelpatch.serving import engines, server

    (package, version), ranks = engines.installed(name), engines.ranks_of(name, wanted.words)
    server.bound(address).close()
    device, gpus = _device(wanted.device)
    exported = engines.described(_export(wanted))
    if reason := engines.why_not(exported, device, ranks, gpus):
        raise ServingError(f"{package} {version} cannot serve {wanted.model} here: {reason}")
    command = engines.command(name, package, exported, wanted.model, device, address, wanted.words)
    console.note(f"{package} {version}: {' '.join(command[1:])}")
    engines.start(name, command, address)


def chosen(wanted: Wanted) -> str:
    """The engine that `auto` means: vLLM or SGLang where it is installed and can serve the model on a GPU that is here,
    else transformers."""
    from accelpatch.serving import engines

    for name in engines.ENGINES:
        try:
            engines.installed(name)
        except ServingError:
            continue
        device, gpus = _device(wanted.device)
        if not gpus:
            break
        try:
            exported = engines.described(_export(wanted))
            reason = engines.why_not(exported, device, engines.ranks_of(name, wanted.words), gpus)
        except AccelpatchError as error:
            reason = str(error)
        if reason is None:
            return name
        console.note(f"not by {name}: {reason}")
    return "transformers"


def _device(text: str) -> tuple[Any, int]:
    """The device, and how many GPUs are here."""
    import torch

    from accelpatch import device as devices

    where = options.torch_device(text)
    return devices.probe(where), torch.cuda.device_count() if where.type == "cuda" else 0


def _export(wanted: Wanted) -> Path:
    """The model as compressed-tensors: of an earlier call with the same recipe and files, or made now."""
    from accelpatch import api
    from accelpatch.models import precheck
    from accelpatch.recipe import recipe as recipes
    from accelpatch.serving import exported

    source = precheck.check(wanted.model)
    version = facts.version("accelpatch") or ""
    if precheck.is_quantised(source):
        files = _files(Path(source.location))
        name = exported.key(files, version)
        return exported.folder(name, None, lambda _, new: api.export(source.location, "compressed-tensors", new))
    recipe = recipes.load(wanted.recipe or options.DEFAULT_RECIPE)
    files = _files(exported.place(source))
    statistics = [] if wanted.statistics is None else [wanted.statistics]
    name = exported.key([*files, *statistics], version, source.name, recipes.dump(recipe), wanted.dtype)

    def quantize(folder: Path) -> None:
        with console.progress_bars() as progress:
            api.quantize(
                wanted.model, recipe, folder, dtype=wanted.dtype, device=options.torch_device(wanted.device),
                statistics=wanted.statistics, verify=wanted.verify, progress=progress,
            )  # fmt: skip

    return exported.folder(name, quantize, lambda saved, new: api.export(saved, "compressed-tensors", new))


def _files(place: Path | None) -> list[Path]:
    if place is None:
        return []
    return [place] if place.is_file() else [file for file in place.iterdir() if file.is_file()]
