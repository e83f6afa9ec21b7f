"""Options that several commands share, and the functions that turn their values into models and devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import console

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RECIPE = "int8"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalog name, folder, .gguf file or Hugging Face id.", show_default=True)
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Name of a bundled recipe, or a YAML file.")
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Python file that registers your own replacers; repeatable.",
    ),
]
StatisticsOption = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, metavar="FILE", help="Of `accelpatch calibrate`, for recipes that need some."
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (AMD too); auto: a GPU if present.")
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Load the model's weights in this dtype.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def load_plugins(files: list[Path] | None) -> None:
    """Register the replacers of each file. The files run as Python code, with the user's rights."""
    if not files:
        return
    from accelpatch import api

    from .script import FailuresAsPython

    for file in files:
        with FailuresAsPython():
            api.load_plugin(file)


def check_recipe(recipe: str) -> None:
    """Raise RecipeError for a recipe that cannot be read, before anything slow starts."""
    from accelpatch.recipe import recipe as recipes

    recipes.load(recipe)


def prepare(recipe: str, plugins: list[Path] | None) -> None:
    """The first steps of a command: silence transformers, check the recipe, load the user's replacers."""
    console.quiet_transformers()
    check_recipe(recipe)
    load_plugins(plugins)


def refuse_patched(name: str) -> None:
    """Raise LoadError for a saved patched model, where a command needs the original."""
    from accelpatch import api
    from accelpatch.errors import LoadError

    if api.is_patched(name):
        raise LoadError(f"{name} is a saved patched model, and this needs the original: give the float checkpoint")


def open_model(name: str, dtype: str, device: str) -> tuple[Any, torch.device]:
    """Load a float model, with progress bars on stderr; returns (accelpatch.models.load.Loaded, its device)."""
    from accelpatch import api

    where = torch_device(device)
    refuse_patched(name)
    with console.progress_bars() as progress:
        return api.load(name, dtype=dtype, device=where, progress=progress), where


def open_patched(
    name: str, *, recipe: str | None, dtype: str, device: str, statistics: Path | None = None
) -> tuple[Any, torch.device]:
    """As `open_model`, patched while it loads by `recipe`, or the default; a saved patched model as it is."""
    from accelpatch import api
    from accelpatch.errors import LoadError

    where = torch_device(device)
    saved = api.is_patched(name)
    if saved and recipe is not None:
        raise LoadError(f"{name} is a saved patched model, which has its recipe: leave out --recipe")
    wanted = None if saved else recipe or default_recipe(name)
    with console.progress_bars() as progress:
        return api.load(name, wanted, dtype=dtype, device=where, statistics=statistics, progress=progress), where


def default_recipe(name: str) -> str:
    """The recipe of a model where the user names none: of a GGUF file the one that leaves its weights as they are."""
    from accelpatch.models.catalog import resolve

    return "gguf" if resolve(name).kind == "gguf" else DEFAULT_RECIPE


def patch(model: Any, recipe: str | None, statistics: Path | None) -> None:
    """Patch a loaded model, with progress bars on stderr; its originals are freed."""
    from accelpatch import api

    with console.progress_bars() as progress:
        api.patch(model, recipe or DEFAULT_RECIPE, keep_original="none", statistics=statistics, progress=progress)


def numbers(text: str, name: str) -> list[int]:
    """The positive numbers of an option's list, such as 64,128. Raises BadParameter for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers, such as 64,128", param_hint=name)
    return [int(part) for part in parts]


def torch_device(text: str) -> torch.device:
    """The device that ``--device`` names. Raises BadParameter for a bad name and LoadError for a GPU not present."""
    import torch

    from accelpatch.errors import LoadError

    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(
            f"{text!r} names no device; use auto, cpu, cuda or cuda:N", param_hint="--device"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{text!r} is not supported; use auto, cpu, cuda or cuda:N", param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(
            f"device {text!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
            "use --device cpu, or see `accelpatch doctor`"
        )
    return device
