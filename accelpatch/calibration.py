"""Calibration: texts run through a model, and yield the statistics with which the sites of a plan are built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accelpatch.checkpoints import statistics as files
from accelpatch.checkpoints.resume import Blocks
from accelpatch.errors import PatchError
from accelpatch.models import signals
from accelpatch.models.family import roles_of
from accelpatch.models.fingerprint import fingerprint
from accelpatch.models.texts import windows
from accelpatch.patching import apply, formula
from accelpatch.patching.capture import observing, run
from accelpatch.patching.match import sites
from accelpatch.patching.plan import Plan
from accelpatch.patching.request import Request
from accelpatch.patching.site import LINEAR_ROLES
from accelpatch.quant.calibration import Collector, Statistics
from accelpatch.quant.smoothing import SiteStatistics
from accelpatch.recipe import mixed
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Recipe
from accelpatch.replacers import mixed_bits, rounding
from accelpatch.replacers.mixed_bits import Measured
from accelpatch.replacers.smoothing import site_statistics
from accelpatch.replacers.stored import stored_of

OUTPUTS = ("q_proj", "k_proj", "v_proj")  # roles whose outputs may get static scales too
MOST = 4096  # rows of an iterator that are kept
OWN_TEXT = "calibrated on {tokens} tokens that the model wrote itself: accelpatch.calibrate(model, data) takes yours"
NOISE = "calibrated on noise in the shapes of the configuration: accelpatch.calibrate(model, data) takes real inputs"

MEASURED, LENGTH = 256, 256  # tokens by which bits are chosen, and tokens of a window

#: makes a model generate faster while it writes its own text
Writing = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, eq=False)
class Bits:
    """The texts by which bits are chosen, see `patch`. watch: the function that progress is reported to."""

    watch: Callable[[str, int, int], None]
    data: Any = None
    tokenizer: Any = None
    resume: Path | None = None


def batches_of(
    model: nn.Module, data: Any, tokenizer: Any, samples: int | None, length: int | None, writing: Writing
) -> list[dict[str, Any]]:
    """The texts of `data`, or the model's own, as `models.texts.windows` makes them; for a model that writes none, what
    `models.signals.batches` makes of `data`."""
    if isinstance(data, Iterator):
        first = list(islice(data, 1))  # only inspected: it is put back at the front
        data = chain(first, data) if first and isinstance(first[0], str) else [*first, *islice(data, MOST)]
    if not hasattr(model, "generate") and not isinstance(data, chain):
        made = signals.batches(model, data, tokenizer, samples)
        if made is not None:
            return made
    with writing(model) if data is None else nullcontext():
        return windows(model, data, tokenizer, samples, length)


def statistics_of(
    model: nn.Module, batches: list[dict[str, Any]], watch: Callable[[str, int, int], None]
) -> Statistics:
    """Run batches through the model and gather statistics of every linear layer's input. See api.calibrate."""
    found = sites(model, roles_of(getattr(model, "config", None)), stored_of)
    paths = {site.path: site.role for site in found if site.role in LINEAR_ROLES and site.k is not None}
    outputs = {path for path, role in paths.items() if role in OUTPUTS}
    collector = Collector()
    watched = observing(model, list(paths), collector.see, outputs, collector.see_output)
    own = formula.by_formula(model, [site for site in found if site.stored is not None])
    with apply.naming("calibration", "texts ran through the model"), own, watched:
        run(model, batches, lambda done, total: watch("calibrate", done, total), keep=False)
        return Statistics(collector.finish(), fingerprint(model), _tokens(batches))


def of_request(model: nn.Module, request: Request, writing: Writing, notes: list[str]) -> Mapping[str, SiteStatistics]:
    """What the sites of a plan are built with. notes: receives what the report should say.

    Raises PatchError for statistics of another model.
    """
    planned, given, watch = request.planned, request.statistics, request.watch
    if request.loaded:
        return {}
    if not planned.calibrates:
        if given is not None or request.data is not None:
            notes.append("statistics or data were given, and no replacement of this recipe needs any")
        return {}
    batches = list[dict[str, Any]]()
    by_rounding = rounding.wanted(planned)
    if by_rounding or given is None:
        asked = planned.recipe.calibrate or {}
        batches = batches_of(model, request.data, request.tokenizer, asked.get("samples"), asked.get("length"), writing)
        if request.data is None:
            notes.append(OWN_TEXT.format(tokens=_tokens(batches)) if hasattr(model, "generate") else NOISE)
    made: dict[str, SiteStatistics] = {}
    if rounding.of_channels(planned):
        made = _by_channels(model, request, batches)
    elif given is not None:
        notes.append("the statistics were not used: this recipe rounds by texts (data=...)")
    if by_rounding:
        with apply.naming(type(model).__name__, "its weights were rounded"):
            kept = _kept(model, request, batches)
            made, said = rounding.rounded(
                planned, model, batches, lambda done, total: watch("calibrate", done, total), kept, made
            )
        notes += said
    return made


def measured_bits(
    model: nn.Module, recipe: Recipe, plan: Callable[[Recipe], Plan], request: Bits, writing: Writing
) -> list[Measured]:
    """What each format that `recipe` could have costs in the layers of `model`. plan: of a recipe for this model."""
    samples, watch = -(-MEASURED // LENGTH), request.watch
    batches = batches_of(model, request.data, request.tokenizer, samples, LENGTH, writing)
    plans = {name: plan(mixed.uniform(recipe, name)) for name in mixed.FORMATS}
    kept = (
        None if request.resume is None else _blocks(model, request.resume, batches, repr(sorted(mixed.FORMATS.items())))
    )
    with apply.naming(type(model).__name__, "its layers were measured"):
        return mixed_bits.measured(plans, model, batches, lambda done, total: watch("measure bits", done, total), kept)


def _by_channels(model: nn.Module, request: Request, batches: list[dict[str, Any]]) -> dict[str, SiteStatistics]:
    given = request.statistics
    if isinstance(given, (str, Path)):
        given = files.load(Path(given))
    if given is None:
        given = statistics_of(model, batches, request.watch)
    elif given.fingerprint != fingerprint(model):
        raise PatchError("the statistics are of another model, or of other weights: calibrate this one")
    with apply.naming(type(model).__name__, "its smoothing was computed"):
        groups = rounding.channel_groups(request.planned)
        return site_statistics(request.planned, groups, given, lambda done, total: request.watch("smooth", done, total))


def _kept(model: nn.Module, request: Request, batches: list[dict[str, Any]]) -> Blocks | None:
    if request.resume is None:
        return None
    return _blocks(model, request.resume, batches, recipes.dump(request.planned.recipe))


def _blocks(model: nn.Module, folder: Path, batches: list[dict[str, Any]], made_by: str) -> Blocks:
    texts = hashlib.sha256(b"".join(_main(batch).cpu().numpy().tobytes() for batch in batches)).hexdigest()
    facts = fingerprint(model), str(getattr(model, "dtype", "")), made_by, texts
    return Blocks(folder, "\n".join(facts))


def _main(batch: Mapping[str, Any]) -> Tensor:
    """Ids of tokens, or else the first tensor."""
    first: Tensor = next(one for one in (batch.get("input_ids"), *batch.values()) if isinstance(one, Tensor))
    return first


def _tokens(batches: list[dict[str, Any]]) -> int:
    """Tokens, or rows of pictures or sound."""
    return sum(len(_main(one)) if "input_ids" not in one else one["input_ids"].numel() for one in batches)
