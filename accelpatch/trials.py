"""Trials of recipes: figures of one in this process, and the search for the fastest one over processes of their own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import accelpatch.models.load as loading
from accelpatch import device as devices
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.timing import once
from accelpatch.checkpoints import as_stored
from accelpatch.errors import AccelpatchError
from accelpatch.from_files import calibrates
from accelpatch.in_memory import AnyRecipe, handle_of, patch, plan
from accelpatch.patching.evaluation import compare
from accelpatch.patching.extent import QUICK
from accelpatch.patching.plan import Plan
from accelpatch.progress import Progress
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Recipe
from accelpatch.runtime.compiled import OFF
from accelpatch.tuning import auto, kernels
from accelpatch.tuning.auto import Bounds, Candidate, Search
from accelpatch.tuning.kernels import Timed

FOR_TRAINING = ("train",)  # bundled recipes that run as another does, but for training
REPEATS = 3
ROWS = {"cpu": (1, 2, 4, 8, 32, 128), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)}  # device -> rows of tokens


@dataclass(frozen=True)
class Use:
    """How a model is measured. repeats: timed calls at most; seconds: where they would take longer, fewer. hopeless: a
    model whose first call takes longer, in seconds, is not timed again."""

    shape: Shape
    repeats: int = REPEATS
    seconds: float = 15.0
    hopeless: float = math.inf


def trial(
    model: nn.Module, recipe: AnyRecipe | None, input_ids: Tensor, use: Use, *, tokenizer: Any = None,
    beside: bool = False, **options: Any,
) -> dict[str, float]:  # fmt: skip
    """Figures of a model in memory with a recipe, or without: seconds of "prefill" and "decode" of a generate() call.

    With a recipe also "kl" (nats) and "top1" against the original on input_ids[1, L]; on a GPU "peak", the most bytes
    that torch had allocated while it generated. beside: the original is timed too, as "original_seconds". options: of
    `patch`, which verifies the first replacement of each kind. The model stays patched, and its originals are freed.
    """
    found: dict[str, float] = {}
    if recipe is None or beside:
        found |= _timed(model, use)
    if recipe is None:
        return found
    if beside:
        found = {"original_seconds": found["prefill"] + found["decode"]}

    @contextmanager
    def patching() -> Iterator[nn.Module]:
        yield patch(model, recipe, keep_original="none", verify=QUICK, tokenizer=tokenizer, **options)

    far = compare(model, input_ids, patching())
    return found | {"kl": max(far.kl, 0.0), "top1": far.top1} | _timed(model, use)


def _timed(model: nn.Module, use: Use) -> dict[str, float]:
    """Medians of whole generate() calls and of those for one token, alternately, after one of each. A busy machine may
    make a short call the longer one, so that no time is the difference of two single calls."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size  # type: ignore[operator, union-attr]
    ids = prompt_ids(vocabulary, use.shape).to(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    calls = [partial(generate, model, ids, count) for count in (1, use.shape.new)]
    times = [[once(call, device) for call in calls]]
    if times[0][1] <= use.hopeless:  # the first ones warm up
        repeats = max(1, min(use.repeats, int(use.seconds / sum(times[0])) - 1))
        times = [[once(call, device) for call in calls] for _ in range(repeats)]
    short, whole = (statistics.median(column) for column in zip(*times, strict=True))
    found = {"prefill": min(short, whole), "decode": max(whole - short, 0.0)}
    if device.type == "cuda":
        found["peak"] = float(torch.cuda.max_memory_allocated(device))
    return found


def tune_auto(
    name: str, run: auto.Run, confirm: auto.Run, shape: Shape, bounds: Bounds, *, device: Any = "cpu",
    names: Sequence[str] = (), limit: float = 300.0, budget: float = 200.0,
) -> Search:  # fmt: skip
    """Find the fastest recipe within the bounds for a model by name. run, confirm, limit, budget: see `auto.search`.

    names: bundled recipes or files; default: all bundled ones. device: where the model will run. Raises
    AccelpatchError, and RecipeError for a name that is no recipe's.
    """
    where = devices.probe(str(device))
    model = loading.from_config(name)
    found = [_candidate(model, one, where, shape, bool(names)) for one in names or recipes.bundled()]
    return auto.search(found, run, confirm, shape, bounds, limit, budget)


def tune_kernels(
    model: Any, *, rows: Sequence[int] = (), budget: float = 150.0, store: bool = True,
    progress: Progress | None = None,
) -> list[Timed]:  # fmt: skip
    """Time the implementations of the calls that a patched model's modules make for so many rows of tokens.

    rows: default: those of ROWS for its device. budget: seconds. store: whether later calls choose by what was found.
    Raises PatchError for a model that is not patched, and CacheError.
    """
    handle_of(model)
    device = next(model.parameters()).device
    calls: dict[tuple[str, int], kernels.Call] = {}
    for count in rows or ROWS[device.type]:
        ids = prompt_ids(model.config.get_text_config(decoder=True).vocab_size, Shape(1, count, 1)).to(device)
        with torch.no_grad(), kernels.recorded(calls):
            model.unpatched_class.forward(model, input_ids=ids, use_cache=False)
    where = devices.probe(str(device))
    return kernels.tune(list(calls.values()), where, budget=budget, store=store, progress=progress)


def tuned_recipe(found: Search, model: str, device: Any) -> str:
    """The chosen recipe as the text of a file, with its figures as comments."""
    assert found.chosen is not None
    chosen = recipe_named(found.chosen.name)
    stem = chosen.name.removeprefix("tuned-")
    named = replace(chosen, name=f"tuned-{stem}", description=f"{stem}, chosen by measurement; {chosen.description}")
    lines = auto.comments(found, model, devices.probe(str(device)).name)
    return "".join(f"# {line}\n" for line in lines) + recipes.dump(named)


def recipe_named(name: str) -> Recipe:
    """The recipe of a trial: of a bundled one or a file, with what stands behind its name."""
    recipe = recipes.load(name.removesuffix(auto.COMPILED))
    if name.endswith(auto.COMPILED):
        return replace(recipe, runtime=replace(recipe.runtime, compile="default"))
    return recipe


def _candidate(model: nn.Module, name: str, device: devices.Device, shape: Shape, asked: bool) -> Candidate:
    recipe = recipes.load(name)
    if as_stored.wants(recipe):
        return Candidate(name, skipped="it holds the weights of a GGUF file as they are stored")
    if recipe.name in FOR_TRAINING and not asked:
        return Candidate(name, skipped="it is for training; name it in --recipes to try it")
    try:
        planned = plan(model, recipe, device=device)
    except AccelpatchError as error:
        return Candidate(name, skipped=f"it does not fit the model: {error}")
    alike, same = _signatures(planned, recipe)
    size, report = planned.resident_bytes + _cache(planned, shape), planned.report()
    compiles = recipe.runtime.compile == OFF and not any(site.fused for site in report.sites)
    nothing = "" if planned.replaced else "it replaces nothing here"
    return Candidate(name, size, report.token_bytes[1], alike, same, calibrates(recipe), compiles, nothing)


def _signatures(planned: Plan, recipe: Recipe) -> tuple[Any, Any]:
    """What is replaced by what, and that with all that makes the weights."""
    alike = [(e.site.path, e.replacer and e.replacer.name, e.choice and e.choice.kernel) for e in planned.replaced]
    options = [(e.site.path, repr(e.rule and sorted(e.rule.options.items(), key=str))) for e in planned.replaced]
    return (alike, recipe.runtime), (alike, recipe.runtime, options, repr(recipe.calibrate))


def _cache(planned: Plan, shape: Shape) -> int:
    """Bytes of the KV cache of the stated use."""
    if not planned.max_length:
        return 0
    return planned.cache_bytes * shape.batch * (shape.prompt + shape.new) // planned.max_length
