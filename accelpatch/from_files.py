"""Models from checkpoints: loaded, patched on the way, and written patched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import accelpatch.models.load as loading
from accelpatch import device as devices
from accelpatch import progress as bars
from accelpatch.checkpoints import as_stored, foreign, quantization_config, quantizer
from accelpatch.checkpoints import save as saving
from accelpatch.checkpoints.saved import RECIPE
from accelpatch.checkpoints.target import unfinished_folder
from accelpatch.errors import LoadError
from accelpatch.in_memory import AnyRecipe, choose_bits, handle_of, patch, save
from accelpatch.kernels.cpu import native_library
from accelpatch.models.catalog import resolve
from accelpatch.models.load import Loaded
from accelpatch.patching import apply
from accelpatch.patching.extent import AUTO, QUICK, Extent, level_of
from accelpatch.patching.match import unwrapped
from accelpatch.patching.plan import Plan
from accelpatch.patching.request import Request
from accelpatch.pipeline import carry_out, compiled, computed_by, plan_of
from accelpatch.progress import Progress, Stopwatch
from accelpatch.quant.calibration import Statistics
from accelpatch.recipe import mixed
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Recipe
from accelpatch.replacers.mixed_bits import Chosen
from accelpatch.report import Report

WHILE_LOADING = "quantised while the weights were read: format errors are those of the weights"
FROM_CHECKPOINT = "quantised weights are those of the checkpoint: their difference from the originals is not measured"


def load(
    name: str, recipe: AnyRecipe | None = None, *, dtype: Any = "auto", device: Any = "cpu",
    statistics: Statistics | str | Path | None = None, data: Any = None, verify: bool | str = True,
    progress: Progress | bool | None = None, resume: Path | None = None, parallel: str | None = None,
) -> Loaded:  # fmt: skip
    """Load a model by short name, folder, GGUF file or hub name; a saved patched model comes back patched.

    recipe: patch a float checkpoint while it loads: each weight is quantised as soon as it is read, so that memory
    holds the result and one weight more; for a recipe that calibrates it is loaded whole. statistics, data: see
    `patch`. dtype: "auto" keeps the checkpoint's. verify, progress: see `patch`. resume: a folder for finished weights,
    the caller's to remove, from which an interrupted call goes on. parallel: as in `patch`; the checkpoint is a float
    one, and needs a recipe. Raises LoadError, and what `patch` raises.
    """
    level = level_of(verify)
    register_checkpoints()
    given: Any = {"statistics": statistics, "data": data, "verify": level, "resume": resume, "parallel": parallel}
    if parallel is not None:
        return _whole(name, recipe, dtype, "cpu", progress, given)
    if str(device).startswith("cpu"):
        native_library.say_where_missing(devices.probe("cpu"))
    layout = foreign.layout_of(name)
    with bars.shown(progress) as shown:
        options = {"dtype": dtype, "device": device, "progress": shown}
        if recipe is None:
            described = None if layout is None else foreign.described(layout)
            with quantization_config.asking(verify=level, progress=shown):
                return loading.load(name, **options, quantization=described)
        wanted = recipes.load(recipe)
        if layout is not None or loading.is_patched(name):
            raise LoadError(f"{name} is a saved patched model, which has its recipe: load it without another")
        if as_stored.wants(wanted):
            return as_stored.load(name, wanted, level, options)
        # what calibrates needs a whole model, and transformers unpacks a GGUF file whole
        if resolve(name).kind != "gguf" and not calibrates(wanted):
            config = quantization_config.AccelpatchConfig(wanted, progress=shown, resume=resume, verify=level)
            return loading.load(name, **options, quantization=config)
        return _whole(name, wanted, dtype, device, shown, given)


def _whole(
    name: str, recipe: AnyRecipe | None, dtype: Any, device: Any, progress: Any, given: dict[str, Any]
) -> Loaded:
    """A float checkpoint that is loaded and then patched. given: more arguments of `patch`."""
    if recipe is None or is_patched(name):
        raise LoadError(f"{name}: what is split among ranks is a float checkpoint, with a recipe to patch it by")
    if as_stored.wants(recipes.load(recipe)):
        raise LoadError(f"{name}: blocks of a GGUF file are not split among ranks; take a recipe such as int4")
    with bars.shown(progress) as shown:
        loaded = loading.load(name, dtype=dtype, device=device, progress=shown)
        patch(loaded.model, recipe, keep_original="none", tokenizer=loaded.tokenizer, progress=shown, **given)
        handle_of(loaded.model).keep_original = apply.LOADED
    return loaded


def calibrates(recipe: Recipe) -> bool:
    """Whether a recipe needs a whole model to calibrate on, as far as its rules say."""
    asked = [rule.options for rule in recipe.rules]
    static = any(one.get("activations", "dynamic") != "dynamic" for one in asked)
    by_inputs = any(one.get("scale_search") or one.get("rounding") == "gptq" for one in asked)
    return static or by_inputs or recipe.calibrate is not None


def is_patched(name: str) -> bool:
    """Whether a name is that of a folder that loads patched: one that was saved so, or one in a layout of others."""
    return loading.is_patched(name) or foreign.layout_of(name) is not None


def quantize(
    name: str, recipe: AnyRecipe, out: str | Path, *, max_shard_size: int | str = "5GB", dtype: Any = "auto",
    device: Any = "cpu", statistics: Statistics | str | Path | None = None, data: Any = None,
    verify: bool | str = True, progress: Progress | bool | None = None, overwrite: bool = False,
    budget: float | str | None = None,
) -> Report:  # fmt: skip
    """Patch a checkpoint while it loads and save it, with its tokenizer, into the folder `out`, all or nothing.

    budget: bits a weight, within which each layer gets a format of its own, see `choose_bits`; the folder's recipe.yaml
    is the recipe of that choice, with what was measured. Finished weights are kept in a folder next to `out` until it
    is written: an interrupted call goes on. `out` is new or empty; overwrite: or holds a model that accelpatch saved,
    which is replaced. Raises LoadError, SaveError, and as `patch`.
    """
    folder = Path(out)
    saving.check(folder, max_shard_size, overwrite)
    given: Any = {"data": data, "progress": progress, "resume": unfinished_folder(folder)}
    options: Any = {"dtype": dtype, "device": device}
    if budget is None:
        loaded = load(name, recipe, **options, statistics=statistics, verify=verify, **given)
        more = list[Callable[[Path], Any]]()
    else:
        loaded, choice = _within(name, recipe, budget, options, {"statistics": statistics, "verify": verify}, given)
        more = [lambda made: (made / RECIPE).write_text(choice.text(), encoding="utf-8")]
    more += [] if loaded.tokenizer is None else [loaded.tokenizer.save_pretrained]
    save(loaded.model, folder, max_shard_size=max_shard_size, more=more)
    saving.forget(folder)
    return handle_of(loaded.model).report()


def _within(
    name: str, recipe: AnyRecipe, budget: float | str, options: Any, patching: Any, given: Any
) -> tuple[Loaded, Chosen]:
    """A float checkpoint that is loaded whole, and patched with bits that are chosen within a budget."""
    mixed.budget_of(str(budget))
    register_checkpoints()
    if is_patched(name):
        raise LoadError(f"{name} is quantised already: bits are chosen for a float checkpoint")
    with bars.shown(given["progress"]) as shown:
        loaded = loading.load(name, **options, progress=shown)
        given = {**given, "progress": shown, "tokenizer": loaded.tokenizer}
        choice = choose_bits(loaded.model, budget, recipe, **given)
        given |= {} if calibrates(choice.recipe) else {"data": None}
        patch(loaded.model, choice.recipe, keep_original="none", **patching, **given)
        handle_of(loaded.model).keep_original = apply.LOADED
    return loaded, choice


def _finish_loading(
    model: nn.Module, planned: Plan, built: list[apply.Built], config: quantization_config.AccelpatchConfig
) -> None:
    """Patch what is left of a model whose quantised weights a checkpoint's loading has built."""
    known = config.level == AUTO and bool(config.verified)
    before = known and config.verified == computed_by(model, planned, planned.recipe)
    extent = Extent(QUICK if before else config.level, loaded=bool(built))
    loaded = {item.entry.site.path: item for item in built}
    with bars.shown(config.progress) as shown:
        carry_out(model, Request(planned, Stopwatch(shown), extent=extent, loaded=loaded, save=save))
    handle_of(model).keep_original, report = apply.LOADED, handle_of(model).record
    if report.verification is not None:
        report.verification.before = before
    if built:
        report.notes.append(FROM_CHECKPOINT if any(item.weight_error is None for item in built) else WHILE_LOADING)
        if report.verification is not None:
            report.verification.against = "the quantised modules"


def register_checkpoints() -> None:
    """Make transformers' from_pretrained load saved patched models, and quantise by a recipe while it loads."""

    def planned(model: nn.Module, recipe: Recipe, device: Any, stored: bool) -> Plan:
        return compiled(plan_of(unwrapped(model), recipe, devices.probe(str(device)), slower=stored), Stopwatch(None))

    quantizer.register(quantizer.Hooks(planned, _finish_loading))
