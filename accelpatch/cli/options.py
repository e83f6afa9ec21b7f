"""The options that several commands share, and what their values mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RECIPE = "int8"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A short name, a folder, a .gguf file or a hub name.", show_default=True)
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="A bundled recipe, or a YAML file.")
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="A Python file that registers replacers of your own; can be given again.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (ROCm is cuda too).")
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="The type that the model is loaded in.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


def load_plugins(files: list[Path] | None) -> None:
    """Register the replacers of each file; the files run as Python, so they are the user's own to trust."""
    from accelpatch import api

    for file in files or ():
        api.load_plugin(file)


def check_recipe(recipe: str) -> None:
    """Fail on a recipe that cannot be read before anything slow starts."""
    from accelpatch import recipe as recipes

    recipes.load(recipe)


def torch_device(text: str) -> torch.device:
    """The device that ``--device`` names, refused here where torch would fail later and less clearly."""
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
