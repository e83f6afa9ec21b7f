"""Options that several commands share, and the functions that turn their values into models and devices."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accelpatch.errors import AccelpatchError, LoadError

from . import checks, console, facts

if TYPE_CHECKING:
    import torch

    from accelpatch.models.catalog import Source

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RECIPE = "int8"
DRIVERS = ("nvidiactl", "kfd", "nvhost-gpu", "nvgpu", "dxg")  # in /dev: NVIDIA, AMD, NVIDIA Jetson (two), WSL
_ORIGINAL = "{} is a saved patched model, and this needs the original: give the float checkpoint"
_OWN_RECIPE = "{} is a saved patched model, which has its recipe: leave out --recipe"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _device(text: str) -> str:
    """The value of ``--device``, checked without importing torch. Raises BadParameter for text that is no device, and
    LoadError for a GPU if torch is a build for the CPU or there is no driver."""
    if not re.fullmatch(r"auto|(cpu|cuda)(:[0-9]{1,2})?", text):
        raise typer.BadParameter(f"{text!r} is not supported; use auto, cpu, cuda or cuda:N", param_hint="--device")
    if text.startswith("cuda") and (version := facts.version("torch") or "").endswith("+cpu"):
        raise LoadError(f"device {text!r} is not here: torch {version} is a build for the CPU; use --device cpu")
    if text.startswith("cuda") and not any(Path("/dev", name).exists() for name in DRIVERS):
        raise LoadError(
            f"device {text!r} is not here: this machine has no driver of a GPU (none of "
            f"{', '.join(f'/dev/{name}' for name in DRIVERS)}); use --device cpu, or see `accelpatch doctor`"
        )
    return text


def file_option(*names: str, **settings: Any) -> Any:
    """An option that names an existing file."""
    return typer.Option(*names, exists=True, dir_okay=False, metavar="FILE", **settings)


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalog name, folder, .gguf file or Hugging Face id.", show_default=True)
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Name of a bundled recipe, or a YAML file.")
]
PluginOption = Annotated[
    list[Path] | None,
    file_option("--plugin", help="Python file that registers your own replacers or implementations; repeatable."),
]
StatisticsOption = Annotated[
    Path | None,
    file_option(callback=checks.statistics, help="File of `accelpatch calibrate`, for recipes that need statistics."),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", callback=_device, help="cpu, cuda or cuda:N (AMD too); auto: a GPU if present."
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Load the model's weights in this dtype.")]
OwnRecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", "-r", metavar="NAME|FILE", help="Name of a bundled recipe, or a YAML file; default: int8."
    ),
]
SystemOption = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the conversation.")]
MaxNewTokensOption = Annotated[int, typer.Option(min=1, help="Generate at most this many tokens an answer.")]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Sample from the likeliest tokens of this total probability; default: the model's."),
]
TopKOption = Annotated[
    int | None, typer.Option(min=0, help="Sample from this many likeliest tokens, 0: all; default: the model's.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Random seed for sampling.")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End an answer before this text, which is not printed; repeatable."),
]
VerifyOption = Annotated[
    Literal["auto", "full", "quick", "off"],
    typer.Option(
        "--verify",
        help="How much is verified: every replacement (auto, full), one of each kind, or nothing.",
    ),
]
AdapterOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter", exists=True, file_okay=False, metavar="DIR", help="Folder of a LoRA adapter; repeatable."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def load_plugins(files: list[Path] | None) -> None:
    """Register the replacers and implementations of each file. The files run as Python code, with the user's rights."""
    if not files:
        return
    from .script import FailuresAsPython

    with FailuresAsPython():
        for file in files:
            if file.suffix != ".py":
                raise AccelpatchError(f"{file} is no Python file; a plugin ends in .py")
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)  # a SyntaxError shows before anything runs
    from accelpatch import api

    for file in files:
        with FailuresAsPython():
            api.load_plugin(file)


def check_replacers(recipe: str, plugins: list[Path] | None) -> None:
    """Raise RecipeError for a recipe that cannot be read, and, if there are no plugins, PlanError for a replacer that is
    not built in."""
    from accelpatch.recipe import recipe as recipes
    from accelpatch.recipe import replacers

    found = recipes.load(recipe)
    if not plugins:
        replacers.check(found)


def check_system(text: str | None) -> None:
    """Raise BadParameter for a system message that is empty or no text."""
    from .prompt import is_unicode

    if text is not None and not (text.strip() and is_unicode(text)):
        raise typer.BadParameter("the system message is empty, or not UTF-8 text", param_hint="--system")


def check_original(name: str, *, fetched: bool = True) -> Source:
    """The source of a float model. Raises LoadError if there is no such model or it is quantised; with `fetched` also
    for one on the hub that is not in the local cache and cannot be downloaded. Does not import torch."""
    from accelpatch.models import precheck

    source = precheck.check(name)
    if precheck.is_quantised(source):
        raise LoadError(_ORIGINAL.format(name))
    if fetched:
        precheck.check_fetched(source)
    return source


def check_name(name: str) -> None:
    """Raise LoadError for a model that is neither on this machine nor can be downloaded. Does not import torch."""
    from accelpatch.models import precheck

    precheck.check_fetched(precheck.check(name))


def is_main_process() -> bool:
    """Whether this process is the one that prints, of those that torchrun or `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def check_generation(
    name: str, recipe: str | None, new_tokens: int, *, original: bool = False, adapters: list[Path] | None = None,
    draft: str | None = None,
) -> None:  # fmt: skip
    """Raise AccelpatchError for options that cannot work, as far as this shows without torch.

    recipe: None for the default one. original: whether the float checkpoint is needed. adapters: folders of adapters.
    draft: name of a model that drafts tokens.
    """
    check_adapters(adapters)
    if draft is not None and adapters:
        raise typer.BadParameter("goes without --adapter", param_hint="--draft")
    from accelpatch.models import precheck
    from accelpatch.recipe import recipe as recipes

    recipes.load(recipe or DEFAULT_RECIPE)
    source = check_original(name, fetched=False) if original else precheck.check(name)
    if precheck.is_quantised(source) and recipe is not None:
        raise LoadError(_OWN_RECIPE.format(name))
    limit = precheck.context_length(source)
    if limit is not None and new_tokens >= limit:
        raise AccelpatchError(
            f"--max-new-tokens {new_tokens} and a prompt are more than the model's context of {limit} tokens: give "
            f"{limit - 1} or less"
        )
    precheck.check_fetched(source)
    if draft is not None:
        check_name(draft)


def prepare(recipe: str, plugins: list[Path] | None) -> None:
    """The first steps of a command: silence transformers, check the recipe, load the user's replacers."""
    console.quiet_transformers()
    console.plain_warnings()
    check_replacers(recipe, plugins)
    load_plugins(plugins)


def refuse_patched(name: str) -> None:
    """Raise LoadError for a saved patched model, where a command needs the original."""
    from accelpatch import api

    if api.is_patched(name):
        raise LoadError(_ORIGINAL.format(name))


def open_model(name: str, dtype: str, device: str) -> Any:
    """Load a float model, with progress bars on stderr; returns an accelpatch.models.load.Loaded."""
    where = torch_device(device)
    from accelpatch import api

    refuse_patched(name)
    with console.progress_bars() as progress:
        return api.load(name, dtype=dtype, device=where, progress=progress)


def open_patched(
    name: str, *, recipe: str | None, dtype: str, device: str, statistics: Path | None, verify: str,
    parallel: str | None = None,
) -> Any:  # fmt: skip
    """`open_model`, but patched while it loads, by `recipe` or the default one; a saved patched model keeps its own
    recipe. parallel: as in `load`."""
    where = torch_device(device)
    from accelpatch import api
    from accelpatch.models.catalog import resolve

    saved = api.is_patched(name)
    if saved and recipe is not None:
        raise LoadError(_OWN_RECIPE.format(name))
    default = "gguf" if resolve(name).kind == "gguf" else DEFAULT_RECIPE  # "gguf" keeps the file's quantised weights
    wanted = None if saved else recipe or (default if parallel is None else DEFAULT_RECIPE)
    with console.progress_bars() as progress:
        return api.load(
            name, wanted, dtype=dtype, device=where, statistics=statistics, verify=verify, progress=progress,
            parallel=parallel,
        )  # fmt: skip


def with_adapters(loaded: Any, folders: list[Path] | None) -> tuple[Any, list[str]]:
    """The loaded model with the adapters of these folders on it, the first one active, and their names."""
    from dataclasses import replace

    if not folders:
        return loaded, []
    from accelpatch import api

    model, names = api.attach(loaded.model, folders)
    return replace(loaded, model=model), names


def check_adapters(folders: list[Path] | None, tokenizer: Any = None) -> None:
    """Raise LoadError for a folder without an adapter. tokenizer: is given the chat template in the first folder, if
    there is one."""
    from accelpatch.models import precheck

    for folder in folders or []:
        precheck.check_adapter(folder)
    if folders and tokenizer is not None and (file := folders[0] / "chat_template.jinja").is_file():
        tokenizer.chat_template = file.read_text(encoding="utf-8")


def patch(model: Any, *, recipe: str | None, verify: str, statistics: Path | None = None) -> None:
    """Patch a loaded model, with progress bars on stderr; its originals are freed."""
    from accelpatch import api

    with console.progress_bars() as progress:
        api.patch(
            model, recipe or DEFAULT_RECIPE, keep_original="none", statistics=statistics, verify=verify,
            progress=progress,
        )  # fmt: skip


def numbers(text: str, name: str) -> list[int]:
    """The positive numbers of an option's list, such as 64,128. Raises BadParameter for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers, such as 64,128", param_hint=name)
    return [int(part) for part in parts]


def torch_device(text: str) -> torch.device:
    """The device that ``--device`` names. Raises LoadError for a GPU that torch does not see."""
    import torch

    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(
            f"device {text!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; "
            "use --device cpu, or see `accelpatch doctor`"
        )
    return device
