"""What calibration makes of weights before their replacements are built: rounded by GPTQ, smoothed by AWQ.

Block by block: the inputs of its linear layers are observed, given what the blocks before it make of their rounded
weights; then its own weights are rounded, and its outputs made with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError, PlanError
from accelpatch.patching.blocks import Blocks, block_of, blocks_of
from accelpatch.patching.capture import Call, first_of, watching
from accelpatch.patching.entry import Entry
from accelpatch.patching.placement import is_offloaded
from accelpatch.patching.plan import Plan
from accelpatch.quant import awq
from accelpatch.quant.formats import dequantize
from accelpatch.quant.hessian import Hessians
from accelpatch.quant.smoothing import SMOOTHING, Channels, SiteStatistics, with_divisors
from accelpatch.replacers.calibrated import HESSIAN
from accelpatch.replacers.expert_rounding import ExpertHessians, floats_of, rounded_experts
from accelpatch.replacers.smoothing import CHANNELS, SEARCH, as_norm_holds
from accelpatch.replacers.weight_kernels import weight_of
from accelpatch.replacers.weight_only import WeightOnly

NOTHING: Mapping[str, SiteStatistics] = MappingProxyType({})
UNREACHED = "no calibration token reached it: rounded to the nearest values"
OF_EXPERTS = "of experts that no calibration token reached: rounded to the nearest values"
FEW = "calibrated on fewer tokens than channels: more text lets them lose less"
OUTSIDE = "outside of the layers: rounded to the nearest values"


class Kept(Protocol):
    """Stores finished blocks, so that an interrupted run can go on: path -> tensors by name."""

    def finished(self, block: str) -> Mapping[str, Mapping[str, Tensor]] | None: ...
    def keep(self, block: str, made: Mapping[str, Mapping[str, Tensor]]) -> None: ...


def searched_groups(plan: Plan) -> list[Any]:
    """The groups of a plan whose factors are those with which their consumers' formats lose least."""
    if (plan.recipe.calibrate or {}).get("alpha") != SEARCH:
        return []
    formats = {entry.site.path for entry in plan.replaced if isinstance(entry.replacer, WeightOnly)}
    return [group for group in plan.groups if all(path in formats for path in group.consumers)]


def channel_groups(plan: Plan) -> list[Any]:
    """The other groups of a plan, whose factors are made of figures of each channel."""
    searched = searched_groups(plan)
    return [group for group in plan.groups if group not in searched]


def of_channels(plan: Plan) -> bool:
    """Whether something in a plan is built with figures of each channel (quant/calibration.py)."""
    return bool(channel_groups(plan)) or any(entry.observer == CHANNELS for entry in plan.replaced)


def wanted(plan: Plan) -> bool:
    """Whether weights of a plan are rounded or smoothed by the second moments of their inputs."""
    return bool(searched_groups(plan)) or any(entry.observer == HESSIAN for entry in plan.replaced)


def rounded(
    plan: Plan,
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    progress: Callable[[int, int], None],
    kept: Kept | None = None,
    given: Mapping[str, SiteStatistics] = NOTHING,
) -> tuple[dict[str, SiteStatistics], list[str]]:
    """Path -> what the replacement there is built with; and notes for the report.

    batches: each the keyword arguments of one call. kept: where finished blocks are read from and written to. given:
    smoothing that is decided already, which weights take in before they are rounded. The model is as it was when this
    returns. Raises KernelError, naming the site, for activations that are not finite, and PlanError for weights that
    are offloaded.
    """
    work = _Work.of(plan, given)
    blocks, runner, done = blocks_of(work.entries), Blocks(model, batches), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, 2 * len(blocks) * len(batches))

    for block, paths in blocks.items():
        finished = None if kept is None else kept.finished(block)
        if finished is not None:
            work.take(finished)
            done += len(batches)
        else:
            observed = _Observed({path: work.entries[path] for path in paths})
            with watching(model, observed.see()):
                runner.run(block, False, step)
            work.make(paths, observed)
            if kept is not None:
                kept.keep(block, work.made(block))
        with written(work.floats(paths)):
            runner.run(block, True, step)
    return work.found, work.notes()


class _Observed:
    """The second moments of the inputs of a block's linear layers and experts.

    Nothing here refers to itself, so that a block's moments are freed with it and not when the garbage is collected.
    """

    def __init__(self, entries: Mapping[str, Entry]):
        self.linear = Hessians()
        self.experts = {path: ExpertHessians(one) for path, one in entries.items() if _of_experts(one)}
        self._paths = tuple(entries)

    def see(self) -> dict[str, Callable[[Call], None]]:
        """path -> takes the calls there."""
        return {path: partial(self._see, path) for path in self._paths}

    def _see(self, path: str, call: Call) -> None:
        if path in self.experts:
            self.experts[path].see(call)
        else:
            self.linear.see(path, first_of(call))


def _of_experts(entry: Entry) -> bool:
    return not isinstance(entry.replacer, WeightOnly)


@dataclass(eq=False)
class _Work:
    """entries: path -> of the weights that are rounded, or read smoothed inputs. sources: path -> sites of the plan.
    groups: those to smooth."""

    entries: Mapping[str, Entry]
    sources: Mapping[str, Any]
    groups: Sequence[Any]
    found: dict[str, SiteStatistics] = field(default_factory=dict)
    unreached: int = 0  # matrices of experts
    few: int = 0  # weights of linear layers with fewer tokens than channels

    @classmethod
    def of(cls, plan: Plan, given: Mapping[str, SiteStatistics]) -> _Work:
        groups = searched_groups(plan)
        smoothed = {path for group in groups for path in group.consumers}
        entries = {
            entry.site.path: entry
            for entry in plan.replaced
            if entry.observer == HESSIAN or entry.site.path in smoothed
        }
        if away := next((path for path, one in entries.items() if is_offloaded(one.site.original)), None):
            raise PlanError(f"{away} is offloaded, and rounding by calibration changes weights: load the model whole")
        sources = {site.path: site for entry in plan.replaced for site in entry.sites}
        return cls(entries, sources, groups, dict(given))

    def make(self, paths: Sequence[str], observed: _Observed) -> None:
        """Smooth and round the weights of these sites."""
        self.smooth(paths, observed.linear)
        self.round(observed.linear)
        for path, hessians in observed.experts.items():
            made, unreached = rounded_experts(self.entries[path], hessians)
            self.found[path] = SiteStatistics(rounded=made)
            self.unreached += unreached

    def notes(self) -> list[str]:
        """What the report should say."""
        left = [path for path in self.entries if self._of(path).rounded is None]
        counts = Counter(UNREACHED if block_of(path) else OUTSIDE for path in left)
        counts[OF_EXPERTS] += self.unreached
        counts[FEW] += self.few
        return [f"{count} weights: {note}" for note, count in counts.items() if count]

    def smooth(self, paths: Sequence[str], hessians: Hessians) -> None:
        """Choose the factors of the groups among these sites."""
        for group in self.groups:
            hessian = hessians.of(group.consumers[0]) if group.consumers[0] in paths else None
            if hessian is None:
                continue
            channels, source = Channels(group.rows, group.size), self.sources[group.source]
            k = len(hessian)
            n = source.n if source.n is not None else k
            rows = channels.places(n, k)
            consumers = [self._rounding(path) for path in group.consumers]
            s = as_norm_holds(source.original, awq.factors(channels, len(rows), hessian, consumers).cpu())
            for path in group.consumers:
                self.found[path] = replace(self._of(path), factors=channels.to_input(s, k))
            self.found[group.source] = with_divisors(self._of(group.source), rows, s, n)

    def round(self, hessians: Hessians) -> None:
        """Round the weights of the sites that were seen."""
        for alike in hessians.shared():
            hessian = hessians.of(alike[0])
            assert hessian is not None
            self.few += len(alike) if hessians.tokens(alike[0]) < len(hessian) else 0
            for path in alike:
                stats, entry = self._of(path), self.entries[path]
                weight = stats.weight(weight_of(entry.site.original))
                self.found[path] = replace(stats, rounded=self._rounded(entry, weight, stats, hessian))

    def floats(self, paths: Sequence[str]) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter of these sites with the floats, as it has them, that its new weight stands for."""
        made: list[tuple[nn.Parameter, Tensor]] = []
        for path in paths:
            stats, entry = self._of(path), self.entries[path]
            if stats.rounded is not None:
                made += floats_of(entry, stats.rounded) if _of_experts(entry) else [floats_of_linear(entry, stats)]
        return made

    def made(self, block: str) -> dict[str, dict[str, Tensor]]:
        """The tensors of what was found in a block: path -> name -> tensor."""
        return {path: _tensors(stats) for path, stats in self.found.items() if block_of(path) == block}

    def take(self, finished: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a block that an earlier run finished. finished: what `made` gave then."""
        for path, parts in finished.items():
            smoothing = {name: parts.get(name) for name in SMOOTHING}
            weight = {name: one for name, one in parts.items() if name not in SMOOTHING}
            stats = SiteStatistics(None, smoothing["factors"], smoothing["divisors"])
            if weight:
                entry = self.entries[path]
                replacer, choice = cast(WeightOnly, entry.replacer), cast(Any, entry.choice)
                device = next(entry.site.original.parameters()).device
                made: Any = {name: one.to(device) for name, one in weight.items()}
                made = made if _of_experts(entry) else replacer.weight(choice, made)
                stats = replace(stats, rounded=made)
            self.found[path] = stats

    def _of(self, path: str) -> SiteStatistics:
        return self.found.get(path, SiteStatistics())

    def _rounding(self, path: str) -> awq.Rounding:
        entry = self.entries[path]
        replacer, detail = cast(WeightOnly, entry.replacer), cast(Any, entry.choice).detail
        return awq.Rounding(weight_of(entry.site.original), replacer.grid(detail), detail["group_size"])

    def _rounded(self, entry: Entry, weight: Tensor, stats: SiteStatistics, hessian: Tensor) -> Any:
        replacer, detail = cast(WeightOnly, entry.replacer), cast(Any, entry.choice).detail
        if stats.factors is not None:
            s = stats.factors.to(hessian.device)
            hessian = hessian / torch.outer(s, s)
        try:
            return replacer.rounded(weight, detail, detail["group_size"], hessian)
        except KernelError as error:
            raise KernelError(f"{entry.site.path}: {error}") from None


def _tensors(stats: SiteStatistics) -> dict[str, Tensor]:
    smoothing = {name: one for name in SMOOTHING if (one := getattr(stats, name)) is not None}
    weight = stats.rounded if isinstance(stats.rounded, Mapping | None) else stats.rounded.tensors()
    return {**smoothing, **(weight or {})}


def floats_of_linear(entry: Entry, stats: SiteStatistics) -> tuple[nn.Parameter, Tensor]:
    """A linear layer's weight without the smoothing."""
    full = dequantize(stats.rounded)
    full = full if stats.factors is None else full / stats.factors.to(full.device)
    full = full if stats.divisors is None else full * stats.divisors.to(full.device)[:, None]
    original = entry.site.original
    return cast(nn.Parameter, original._parameters["weight"]), (
        full.t() if type(original).__name__ == "Conv1D" else full
    )


@contextmanager
def written(weights: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Context manager in which parameters have other values."""
    kept = [parameter.data for parameter, _ in weights]
    try:
        for parameter, full in weights:
            parameter.data = full.to(parameter.device, parameter.dtype)
        yield
    finally:
        for (parameter, _), before in zip(weights, kept, strict=True):
            parameter.data = before
