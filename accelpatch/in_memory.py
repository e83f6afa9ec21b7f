"""Plans, patches and undoes patches of models that are in memory: the stages in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

import accelpatch.models.load as loading
from accelpatch import device as devices
from accelpatch import progress as bars
from accelpatch.calibration import Bits, batches_of, measured_bits, statistics_of
from accelpatch.checkpoints import as_stored, gguf_tensors
from accelpatch.checkpoints import save as saving
from accelpatch.checkpoints import statistics as files
from accelpatch.device import Device
from accelpatch.errors import PatchError, PlanError, SaveError
from accelpatch.parallel.device_map import placement_of
from accelpatch.parallel.tensor_parallel import sharded, shards_of, split
from accelpatch.patching import apply, harness
from accelpatch.patching.evaluation import WINDOW, Evaluation, compare
from accelpatch.patching.extent import QUICK, Extent, level_of
from accelpatch.patching.harness import Score
from accelpatch.patching.match import unwrapped
from accelpatch.patching.patchable import check_module, check_patchable, samples_of
from accelpatch.patching.plan import Plan
from accelpatch.patching.request import Request
from accelpatch.pipeline import carry_out, compiled, computed_by, plan_of, writing
from accelpatch.progress import Progress, Stopwatch
from accelpatch.quant.calibration import Statistics
from accelpatch.recipe import mixed
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Recipe
from accelpatch.replacers.mixed_bits import Chosen, chosen

Model = TypeVar("Model", bound=nn.Module)
AnyRecipe = str | Path | Mapping[str, Any] | Recipe
KEEP_ORIGINAL = ("cpu", "none")


def plan(model: nn.Module, recipe: AnyRecipe = "int8", *, device: Device | None = None) -> Plan:
    """The Plan that `patch` would carry out. Changes and allocates nothing, so `model` may be on the meta device.

    device: the hardware to plan for; default: the one that the model is on. Raises RecipeError and PlanError.
    """
    check_module(model)
    return plan_of(unwrapped(model), recipes.load(recipe), device)


def plan_from_config(
    name: str, recipe: AnyRecipe = "int8", *, arch: str | None = None, max_length: int | None = None, ranks: int = 1
) -> Plan:
    """A Plan from a model's configuration alone. name: a catalog name, or a folder with a config.json.

    arch: the GPU to plan for, a key of `accelpatch.device.KNOWN`; default: this CPU. max_length: length of the KV cache
    in tokens, in place of the recipe's. ranks: plan for the first of so many, among which tensor parallel splits the
    model. Raises LoadError, RecipeError, PlanError, and PatchError for a model that cannot be split.
    """
    if arch is not None and arch not in devices.KNOWN:
        raise PlanError(devices.unknown(arch))
    loaded = recipes.load(recipe)
    if as_stored.wants(loaded) and (path := loading.gguf_file(name)) is not None:
        loaded = as_stored.recipe_of(loaded, gguf_tensors.open_gguf(path))
    if max_length is not None:
        loaded = replace(loaded, runtime=replace(loaded.runtime, max_length=max_length))
    model = loading.from_config(name)
    if ranks > 1:
        split(model, loaded, None, 0, ranks)
    return plan(model, loaded, device=devices.KNOWN[arch] if arch else devices.probe("cpu"))


def calibrate(
    model: nn.Module, data: Any = None, *, tokenizer: Any = None, samples: int | None = None,
    length: int | None = None, progress: Progress | bool | None = None,
) -> Statistics:  # fmt: skip
    """Statistics of every linear layer's input, for recipes such as smoothquant: patch(model, recipe, statistics=...).

    data: a text file, strings, or rows with a column "text" (a `datasets` object), up to `samples` windows of `length`
    tokens; None: text that the model writes itself. Of a model that writes none (an encoder): mappings of tensors, each
    the arguments of a call, or pictures or arrays of sound with the model's processor as `tokenizer`; None: noise in
    the shapes of its configuration. Raises LoadError for data that will not do, and PatchError, naming
    the layer, for inputs that are not finite.
    """
    check_module(model)
    inner = unwrapped(model)
    check_patchable(inner)
    with bars.shown(progress) as shown:
        batches = batches_of(inner, data, tokenizer, samples, length, writing)
        return statistics_of(inner, batches, Stopwatch(shown))


def save_statistics(statistics: Statistics, file: str | Path) -> None:
    """Write statistics to a safetensors file, which `patch(..., statistics=file)` reads. Raises SaveError."""
    files.save(statistics, Path(file))


def patch(
    model: Model, recipe: AnyRecipe = "int8", *, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    device: Device | None = None, keep_original: str = "cpu", verify: bool | str = True,
    statistics: Statistics | str | Path | None = None, data: Any = None, tokenizer: Any = None,
    progress: Progress | bool | None = None, resume: Path | None = None, parallel: str | None = None,
) -> Model:  # fmt: skip
    """Replace modules of `model` in place as `recipe` says, and return it; on an error nothing is changed.

    recipe: a bundled one's name, the path of a YAML file, a mapping of what such a file holds, or a Recipe. inputs:
    samples for verification, each the keyword arguments of one call, or one alone; default: small ones made from the
    model's configuration (if it accepts none, nothing is verified, with a warning). keep_original: "cpu" keeps the
    original weights in host memory for `unpatch`, "none" frees them. verify: compare replacements with their references
    and their originals, and the whole model before and after; how much, says patching/extent.py: True or "auto",
    "full", "quick", False or "off". statistics: of `calibrate`, or a file of them, for recipes that need some. data,
    tokenizer: texts to calibrate on, as of `calibrate`; default: the model calibrates on its own. progress: called with
    (stage, done, total); default: bars in a terminal or a notebook; False for none. resume: a folder for weights that
    calibration has made, the caller's to remove, from which an interrupted call goes on. parallel: "tp" in a job of
    several processes: each keeps and patches its part (docs/parallel.md), which is what `unpatch` gives back. A
    PeftModel keeps its adapters. Raises ArgumentError, RecipeError, PlanError, PatchError and KernelError.
    """
    if keep_original not in KEEP_ORIGINAL:
        raise PatchError(f"keep_original is {keep_original!r}; it is one of {', '.join(KEEP_ORIGINAL)}")
    check_module(model)
    samples = samples_of(inputs)
    given, model, extent = model, unwrapped(model), Extent(level_of(verify))
    check_patchable(model, placement_of(model))
    wanted = recipes.load(recipe)
    alike = {"the recipe": recipes.dump(wanted), "verify": extent.level, "keep_original": keep_original}
    with sharded(model, parallel, wanted, alike), bars.shown(progress) as shown:
        watch = Stopwatch(shown)
        planned = compiled(plan(model, wanted, device=device), watch)
        request = Request(
            planned, watch, samples, keep_original, extent, save=save, statistics=statistics,
            placement=placement_of(model), data=data, tokenizer=tokenizer, resume=resume,
        )  # fmt: skip
        carry_out(model, request)
    if not hasattr(given, apply.HANDLE):
        handle_of(given).show_on(given)
    return given


def choose_bits(
    model: nn.Module, budget: float | str, recipe: AnyRecipe = "int4", *, data: Any = None, tokenizer: Any = None,
    progress: Progress | bool | None = None, resume: Path | None = None,
) -> Chosen:  # fmt: skip
    """Choose a format for each linear layer and expert, with `budget` bits a weight on average, scales with them.

    Measured is the mean KL in nats of the model's next tokens with one layer rounded to the nearest values, on a few
    windows of `data`; the choice has about the least sum of them. budget: a number, or text such as "4.5bits". recipe:
    what else is done. data, tokenizer, progress, resume: see `patch`, which takes the `recipe` of the result. The head
    is not counted. Raises ArgumentError, RecipeError, PlanError, and KernelError for a budget below the smallest
    format.
    """
    check_module(model)
    inner, wanted = unwrapped(model), recipes.load(recipe)
    check_patchable(inner)
    most = mixed.budget_of(str(budget))
    with bars.shown(progress) as shown:
        asked = Bits(Stopwatch(shown), data, tokenizer, resume)
        found = measured_bits(inner, wanted, lambda one: plan_of(inner, one, None), asked, writing)
    return chosen(wanted, found, most)


def unpatch(model: Model) -> Model:
    """Restore the original modules of `model`, the same objects with the same bits, and return it.

    Raises PatchError where the model is not patched, or cannot be restored (with keep_original="none", say).
    """
    handle_of(model).unpatch()
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
    model: nn.Module, recipe: AnyRecipe, input_ids: Tensor, *, window: int = WINDOW, stride: int | None = None,
    progress: Progress | bool | None = None, **options: Any,
) -> Evaluation:  # fmt: skip
    """Compare a causal LM before and after `recipe` on input_ids [1, L]: KL divergence, top-1 agreement, perplexity.

    window, stride: how the text is read, see patching/evaluation.py. options: of `patch`, such as statistics and data.
    The model is unpatched at the end. Raises PatchError for fewer than two tokens, or a stride beyond the window.
    """
    with bars.shown(progress) as shown:
        patching = patched(model, recipe, verify=False, progress=shown, **options)
        return compare(model, input_ids, patching, shown, window, stride)


def evaluate_tasks(
    model: nn.Module, recipe: AnyRecipe, tasks: Sequence[str], *, tokenizer: Any, limit: int | None = None,
    **options: Any,
) -> list[Score]:  # fmt: skip
    """Scores of lm-evaluation-harness before and after `recipe`. limit: samples of each task. options: of `patch`.

    The model is unpatched at the end. Raises ArgumentError where lm-evaluation-harness is missing or lacks a task.
    """
    options |= {"tokenizer": tokenizer, "verify": False}
    return harness.compare(model, tokenizer, tasks, limit, lambda: patched(model, recipe, **options))


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise ArgumentError where lm-evaluation-harness is missing or lacks a task."""
    harness.task_manager(tasks)


def save(model: nn.Module, folder: str | Path, **options: Any) -> None:
    if shards_of(unwrapped(model)) is not None:
        raise SaveError("each rank has a part of the model, and a checkpoint holds the whole: save it in one process")
    handle = handle_of(model)
    found = handle.record.verification
    known = found is not None and not found.failures and (found.before or found.extent != QUICK)
    verified = computed_by(model, handle.plan, saving.recipe_of(handle.plan)) if known else ""
    saving.save(model, folder, handle.plan, verified=verified, **options)


def handle_of(model: nn.Module) -> apply.Handle:
    check_module(model)
    handle = vars(unwrapped(model)).get(apply.HANDLE)
    if handle is None:
        raise PatchError("the model is not patched; call accelpatch.patch(model, recipe) first")
    assert isinstance(handle, apply.Handle)
    return handle
