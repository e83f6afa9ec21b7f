"""Lays out fused layers that are modules in the place of the originals, and verifies them as wholes against their
own replaced modules.

Each gets the calls that the original had on the sample inputs. The bound is that of fused layers in steps
(verified.py): units of the dtype's precision, more where the modules' own output moves further when each input moves by
one rounding, or where attention adds up so many tokens that the order of the sum shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.laid_out import LaidOutLayer
from accelpatch.fusion.verified import AMPLIFIED, DRAWS, Pair, bound_of, first_of_kind
from accelpatch.patching.capture import Call
from accelpatch.patching.extent import Extent
from accelpatch.patching.verify import UNITS, SiteErrors, format_error, units_apart


@dataclass(frozen=True)
class Run:
    """Outputs of one call: of the fused layer, of its modules, of the original; moved: of the modules for inputs that
    are one rounding away, drawn by a seed; summed: tokens over which its attention sums, 1 where they do not count."""

    fused: Tensor
    modules: Tensor
    original: Sequence[Tensor]
    moved: Callable[[int], Tensor]
    summed: int = 1


# The most by which one addition in float32, in which attention is summed, is off. N of them one after the other are off
# by about sqrt(N) of it, which for the 1,500 tokens of Whisper's encoder is more than the bound of a layer in float32.
ROUNDING = 2**-24

RunsOf = Callable[[Any, Sequence[Call]], Iterable[Run]]


def lay_out(layers: Mapping[str, LaidOutLayer[Any]], planned: Mapping[str, bool]) -> dict[str, str]:
    """Lay out the layers that the plan has fused; returns path -> why, of those that cannot be."""
    failed = {}
    for path, layer in layers.items():
        if planned.get(path):
            try:
                layer.lay_out()
            except CannotFuse as error:
                failed[path] = str(error)
    return failed


def check_laid_out(
    layers: Mapping[str, LaidOutLayer[Any]], runs_of: RunsOf, calls: Mapping[str, Sequence[Call]], metric: str,
    extent: Extent, progress: Callable[[int, int], None],
) -> tuple[dict[str, SiteErrors], dict[str, str]]:  # fmt: skip
    """(errors, why not) by path, of the fused layers that `extent` names and of those over their bound, which run their
    modules from then on. runs_of: makes the runs of a layer on recorded calls; calls: the originals', by path."""
    fused = {path: layer for path, layer in layers.items() if layer.is_fused}
    paths, kinds = list(fused), first_of_kind(list(fused.values()))
    found, failed = dict[str, SiteErrors](), dict[str, str]()
    for place, (path, layer) in enumerate(fused.items()):
        first = paths[kinds[place]]
        if (first == path or first in failed or extent.layers) and calls.get(path):
            try:
                errors = found[path] = errors_of(layer, runs_of(layer, calls[path]), metric)
            except CannotFuse as error:
                failed[path] = str(error)
                continue
            assert errors.kernel_bound is not None
            if errors.units > errors.kernel_bound:
                failed[path] = (
                    f"it is {errors.units:.3g} units of its dtype's precision from its modules, and the bound is "
                    f"{errors.kernel_bound:.3g}"
                )
        progress(place + 1, len(fused))
    for path in failed:
        layers[path].run_modules()
    return found, failed


def errors_of(layer: LaidOutLayer[Any], runs: Iterable[Run], metric: str) -> SiteErrors:
    """The errors of a fused layer. kernel_error and kernel_bound are in units."""
    own, original, moved = list[Pair](), list[Pair](), [0.0]
    least = bound_of(layer, next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32))
    with torch.no_grad():
        for run in runs:
            # twice, since the fused layer and its modules may both be off
            least = max(least, 2 * math.sqrt(run.summed) * ROUNDING / UNITS[run.modules.dtype])
            own.append((run.fused, run.modules))
            original += [(run.fused, one) for one in run.original]
            if units_apart(own[-1:]) > least:
                moved += [units_apart([(run.moved(seed), run.modules)]) for seed in range(DRAWS)]
    units = units_apart(own)
    return SiteErrors(units, max(least, AMPLIFIED * max(moved)), format_error(metric, original), units)
