"""The public functions: plan, patch, unpatch and the rest. They call the stages in order and hold no other logic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

import accelpatch.models.load as loading
from accelpatch import device as devices
from accelpatch import progress as bars
from accelpatch.checkpoints import as_stored, foreign, gguf_tensors, quantization_config, quantizer
from accelpatch.checkpoints import save as saving
from accelpatch.checkpoints import statistics as files
from accelpatch.checkpoints.export import export
from accelpatch.device import Device
from accelpatch.errors import LoadError, PatchError, PlanError, SaveError
from accelpatch.kernels.check.selftest import run as selftest
from accelpatch.models.catalog import resolve
from accelpatch.models.family import roles_of
from accelpatch.models.load import Loaded
from accelpatch.models.load import random as random_model
from accelpatch.models.smoothing import smoothing_groups
from accelpatch.parallel.device_map import placement_of
from accelpatch.patching import apply
from accelpatch.patching.evaluation import Evaluation, compare
from accelpatch.patching.extent import AUTO, QUICK, Extent, level_of
from accelpatch.patching.match import unwrapped
from accelpatch.patching.patchable import check_module, check_patchable
from accelpatch.patching.placement import device_of
from accelpatch.patching.plan import Plan, make_plan
from accelpatch.pipeline import calibrated, carry_out, compiled, computed_by
from accelpatch.progress import Progress
from accelpatch.quant.calibration import Statistics
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Recipe
from accelpatch.replacers import registry, replacer
from accelpatch.replacers.plugin import load_plugin
from accelpatch.replacers.stored import known
from accelpatch.report import Report, Stopwatch
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.generation.first_use import on_first_use
from accelpatch.runtime.generation.on_demand import unpatch_on_demand
from accelpatch.tuning.attention import tune as tune_attention

__all__ = [
    "calibrate", "evaluate", "export", "is_patched", "load", "load_plugin", "patch", "patch_on_first_use", "patched",
    "plan", "plan_from_config", "quantize", "random_model", "replacer", "save_statistics", "selftest", "tune_attention",
    "unpatch",
]  # fmt: skip

Model = TypeVar("Model", bound=nn.Module)
AnyRecipe = str | Path | Mapping[str, Any] | Recipe
KEEP_ORIGINAL = ("cpu", "none")
WHILE_LOADING = "quantised while the weights were read: format errors are those of the weights"
FROM_CHECKPOINT = "quantised weights are those of the checkpoint: their difference from the originals is not measured"


def load(
    name: str, recipe: AnyRecipe | None = None, *, dtype: Any = "auto", device: Any = "cpu",
    statistics: Statistics | str | Path | None = None, verify: bool | str = True,
    progress: Progress | bool | None = None, resume: Path | None = None,
) -> Loaded:  # fmt: skip
    """Load a model by short name, folder, GGUF file or hub name; a saved patched model comes back patched.

    recipe: patch a float checkpoint while it loads: each weight is quantised as soon as it is read, so that memory
    holds the result and one weight more; for a recipe that calibrates it is loaded whole. statistics: see `patch`.
    dtype: "auto" keeps the checkpoint's. verify, progress: see `patch`. resume: a folder for finished weights, the
    caller's to remove, from which an interrupted call goes on. Raises LoadError, and what `patch` raises.
    """
    level = level_of(verify)
    with bars.shown(progress) as shown:
        return _load(name, recipe, {"dtype": dtype, "device": device, "progress": shown}, statistics, level, resume)


def _load(
    name: str, recipe: AnyRecipe | None, options: dict[str, Any], statistics: Any, level: str, resume: Path | None
) -> Loaded:
    register_checkpoints()
    layout = foreign.layout_of(name)
    if recipe is None:
        described = None if layout is None else foreign.described(layout)
        own = {"verify": level, "progress": options["progress"]}
        return loading.load(name, **options, quantization=described, own=own)
    wanted = recipes.load(recipe)
    if layout is not None or loading.is_patched(name):
        raise LoadError(f"{name} is a saved patched model, which has its recipe: load it without another")
    if as_stored.wants(wanted):
        return as_stored.load(name, wanted, level, options)
    if resolve(name).kind == "gguf" or _calibrates(wanted):  # transformers unpacks the first kind whole
        loaded = loading.load(name, **options)
        patch(
            loaded.model, wanted, keep_original="none", statistics=statistics, verify=level,
            progress=options["progress"],
        )  # fmt: skip
        return loaded
    config = quantization_config.AccelpatchConfig(wanted, progress=options["progress"], resume=resume, verify=level)
    return loading.load(name, **options, quantization=config)


def is_patched(name: str) -> bool:
    """Whether a name is that of a folder that loads patched: one that was saved so, or one in a layout of others."""
    return loading.is_patched(name) or foreign.layout_of(name) is not None


def quantize(
    name: str, recipe: AnyRecipe, out: str | Path, *, max_shard_size: int | str = "5GB", dtype: Any = "auto",
    device: Any = "cpu", statistics: Statistics | str | Path | None = None, verify: bool | str = True,
    progress: Progress | bool | None = None,
) -> Report:  # fmt: skip
    """Patch a checkpoint while it loads and save it, with its tokenizer, into the folder `out`, all or nothing.

    Finished weights are kept beside `out` until it is written, so that an interrupted call goes on. Raises LoadError,
    SaveError, and what `patch` raises.
    """
    source, folder = resolve(name), Path(out)
    if source.kind == "folder" and folder.resolve() == Path(source.location).resolve():
        raise SaveError(f"{folder} holds the float weights: name another folder")
    saving.check(folder, max_shard_size)
    loaded = load(
        name, recipe, dtype=dtype, device=device, statistics=statistics, verify=verify, progress=progress,
        resume=saving.beside(folder),
    )  # fmt: skip
    more = [] if loaded.tokenizer is None else [loaded.tokenizer.save_pretrained]
    _save(loaded.model, folder, max_shard_size=max_shard_size, more=more)
    saving.forget(folder)
    return _handle(loaded.model).report()


def plan(model: nn.Module, recipe: AnyRecipe = "int8", *, device: Device | None = None) -> Plan:
    """The Plan that `patch` would carry out. Changes and allocates nothing, so `model` may be on the meta device.

    device: the hardware to plan for; default: the one that the model is on. Raises RecipeError and PlanError.
    """
    check_module(model)
    model = unwrapped(model)
    placement, roles = placement_of(model), roles_of(getattr(model, "config", None))
    facts = device or devices.probe(str(placement.device or device_of(model)))
    return make_plan(model, recipes.load(recipe), facts, roles, registry(), smoothing_groups(model), known, placement)


def plan_from_config(
    name: str, recipe: AnyRecipe = "int8", *, arch: str | None = None, max_length: int | None = None
) -> Plan:
    """A Plan from a model's configuration alone. name: a catalog name, or a folder with a config.json.

    arch: the GPU to plan for, a key of `accelpatch.device.KNOWN`; default: this CPU. max_length: length of the KV cache
    in tokens, in place of the recipe's. Raises LoadError, RecipeError and PlanError.
    """
    if arch is not None and arch not in devices.KNOWN:
        raise PlanError(f"no facts are known of the arch {arch}; known are: {', '.join(devices.KNOWN)}")
    loaded = recipes.load(recipe)
    if as_stored.wants(loaded) and (path := loading.gguf_file(name)) is not None:
        loaded = as_stored.recipe_of(loaded, gguf_tensors.open_gguf(path))
    if max_length is not None:
        loaded = replace(loaded, runtime=replace(loaded.runtime, max_length=max_length))
    return plan(loading.from_config(name), loaded, device=devices.KNOWN[arch] if arch else devices.probe("cpu"))


def calibrate(
    model: nn.Module, data: Any = None, *, tokenizer: Any = None, samples: int | None = None,
    length: int | None = None, progress: Progress | bool | None = None,
) -> Statistics:  # fmt: skip
    """Statistics of every linear layer's input, for recipes such as smoothquant: patch(model, recipe, statistics=...).

    data: a text file, strings, or rows with a column "text" (a `datasets` object), up to `samples` windows of `length`
    tokens; None: text that the model writes itself. Raises LoadError for data that will not do, and PatchError, naming
    the layer, for inputs that are not finite.
    """
    check_module(model)
    inner = unwrapped(model)
    check_patchable(inner)
    with bars.shown(progress) as shown:
        return calibrated(inner, data, tokenizer, Stopwatch(shown), samples, length)


def save_statistics(statistics: Statistics, file: str | Path) -> None:
    """Write statistics to a safetensors file, which `patch(..., statistics=file)` reads. Raises SaveError."""
    files.save(statistics, Path(file))


def patch(
    model: Model,
    recipe: AnyRecipe = "int8",
    *,
    inputs: Sequence[Mapping[str, Any]] | None = None,
    device: Device | None = None,
    keep_original: str = "cpu",
    verify: bool | str = True,
    statistics: Statistics | str | Path | None = None,
    progress: Progress | bool | None = None,
) -> Model:
    """Replace modules of `model` in place as `recipe` says, and return it; on an error nothing is changed.

    recipe: a bundled one's name, the path of a YAML file, a mapping of what such a file holds, or a Recipe. inputs:
    samples for verification, each the keyword arguments of one call; default: small ones made from the model's
    configuration (if it accepts none of those, nothing is verified, with a warning). keep_original: "cpu" keeps the
    original weights in host memory for `unpatch`, "none" frees them. verify: compare replacements with their references
    and their originals, and the whole model before and after; how much, says patching/extent.py: True or "auto",
    "full", "quick", False or "off". statistics: of `calibrate`, or a file of them, for recipes that need some; default:
    the model calibrates on its own text. progress: called with (stage, done, total); default: bars in a terminal or a
    notebook; False for none. A PeftModel keeps its adapters. Raises ArgumentError, RecipeError, PlanError, PatchError
    and KernelError.
    """
    if keep_original not in KEEP_ORIGINAL:
        raise PatchError(f"keep_original is {keep_original!r}; it is one of {', '.join(KEEP_ORIGINAL)}")
    check_module(model)
    given, model, extent = model, unwrapped(model), Extent(level_of(verify))
    placement = placement_of(model)
    check_patchable(model, placement)
    with bars.shown(progress) as shown:
        watch = Stopwatch(shown)
        planned = compiled(plan(model, recipe, device=device), watch)
        carry_out(model, planned, inputs, keep_original, extent, watch, {}, _save, statistics, placement)
    return given


def _calibrates(recipe: Recipe) -> bool:
    """Whether a patch by this recipe may need statistics, and so a whole model."""
    static = any(rule.options.get("activations", "dynamic") != "dynamic" for rule in recipe.rules)
    return static or recipe.calibrate is not None


def _save(model: nn.Module, folder: str | Path, **options: Any) -> None:
    handle = _handle(model)
    found = handle.record.verification
    known = found is not None and (found.before or found.extent != QUICK)
    verified = computed_by(handle.plan, saving.recipe_of(handle.plan)) if known else ""
    saving.save(model, folder, handle.plan, verified=verified, **options)


def _finish_loading(
    model: nn.Module, planned: Plan, built: list[apply.Built], config: quantization_config.AccelpatchConfig
) -> None:
    """Patch what is left of a model whose quantised weights a checkpoint's loading has built."""
    before = config.level == AUTO and config.verified == computed_by(planned, planned.recipe)
    extent = Extent(QUICK if before else config.level, loaded=bool(built))
    at_hand = {item.entry.site.path: item for item in built}
    with bars.shown(config.progress) as shown:
        carry_out(model, planned, None, "none", extent, Stopwatch(shown), at_hand, _save)
    report = _handle(model).record
    if report.verification is not None:
        report.verification.before = before
    if built:
        report.notes.append(FROM_CHECKPOINT if any(item.weight_error is None for item in built) else WHILE_LOADING)
        if report.verification is not None:
            report.verification.against = "the quantised modules"


def register_checkpoints() -> None:
    """Make transformers' from_pretrained load saved patched models, and quantise by a recipe while it loads."""
    quantizer.register(quantizer.Hooks(_plan_for, _finish_loading))


def _plan_for(model: nn.Module, recipe: Recipe, device: Any) -> Plan:
    return compiled(plan(model, recipe, device=devices.probe(str(device))), Stopwatch(None))


def unpatch(model: Model) -> Model:
    """Restore the original modules of `model`, the same objects with the same bits, and return it.

    Raises PatchError where the model is not patched, or cannot be restored (with keep_original="none", say).
    """
    _handle(model).unpatch()
    return model


@contextmanager
def patched(model: Model, recipe: AnyRecipe = "int8", **options: Any) -> Iterator[Model]:
    """Context manager: `patch` with the same options for the `with` block, `unpatch` at its end or on an exception."""
    patch(model, recipe, **options)
    try:
        yield model
    finally:
        unpatch(model)


def evaluate(
    model: nn.Module, recipe: AnyRecipe, input_ids: Tensor, *, statistics: Statistics | str | Path | None = None,
    progress: Progress | bool | None = None,
) -> Evaluation:  # fmt: skip
    """Compare a causal LM before and after `recipe` on input_ids [1, L]: KL divergence, top-1 agreement, perplexity.

    The model is unpatched at the end. Raises PatchError for fewer than two tokens.
    """
    with bars.shown(progress) as shown:
        patching = patched(model, recipe, verify=False, statistics=statistics, progress=shown)
        return compare(model, input_ids, patching, shown)


@contextmanager
def patch_on_first_use(
    recipe: AnyRecipe,
    *,
    on_patched: Callable[[nn.Module], None] | None = None,
    on_left: Callable[[nn.Module, str], None] | None = None,
    **options: Any,
) -> Iterator[None]:
    """Context manager: patches every transformers model at its first forward or generate; used by `accelpatch exec`.

    That is the first in eval mode that asks for no gradient. options: those of `patch`. on_patched: called with each
    model after it was patched. on_left: called with the reason and a model that cannot be patched, or not yet, or that
    is there at the end and was never called; without it what cannot be patched is an error. With it and
    keep_original="cpu", a model is also unpatched as soon as the program trains, saves, resizes or pickles it.
    """

    def whole(model: nn.Module) -> None:
        for part in [one for one in model.modules() if apply.HANDLE in vars(one) and one is not model]:
            with vars(part)[CODE].alone():
                unpatch(part)  # it was used, and patched, on its own

    def act(model: nn.Module) -> None:
        if apply.HANDLE not in vars(model):
            patch(model, recipe, **options)
            if on_left is not None and options.get("keep_original", "cpu") == "cpu":
                unpatch_on_demand(model, on_left)
            if on_patched is not None:
                on_patched(model)

    with on_first_use(act, on_left, whole):
        yield


def _handle(model: nn.Module) -> apply.Handle:
    check_module(model)
    handle = vars(unwrapped(model)).get(apply.HANDLE)
    if handle is None:
        raise PatchError("the model is not patched; call accelpatch.patch(model, recipe) first")
    assert isinstance(handle, apply.Handle)
    return handle
