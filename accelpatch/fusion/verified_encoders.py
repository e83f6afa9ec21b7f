"""Lays out the fused layers of encoders and verifies them as wholes, beside their own replaced modules.

Each gets the calls that the original had on the sample inputs. The bound is that of fused decoder layers (verified.py):
units of the dtype's precision, more where the modules' own output moves further when each input moves by one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.encoder_layer import FusedEncoderLayer
from accelpatch.fusion.laid_out import LaidOutLayer
from accelpatch.fusion.verified import AMPLIFIED, DRAWS, Pair, bound_of, first_of_kind, one_rounding_away
from accelpatch.modules.replacement import run_original
from accelpatch.patching.capture import Call, copied, floats
from accelpatch.patching.extent import Extent
from accelpatch.patching.verify import SiteErrors, format_error, units_apart


def encoder_layers(model: nn.Module) -> dict[str, FusedEncoderLayer]:
    """Dotted name -> layer, of those that a patch put into a model."""
    return {path: one for path, one in model.named_modules() if isinstance(one, FusedEncoderLayer)}


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


def check_encoders(
    layers: Mapping[str, FusedEncoderLayer], calls: Mapping[str, Sequence[Call]], metric: str, extent: Extent,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, SiteErrors], dict[str, str]]:  # fmt: skip
    """(errors, why not) by path, of the fused layers that `extent` names and of those over their bound, which run
    their modules from then on. calls: the originals', by path."""
    fused = {path: layer for path, layer in layers.items() if layer.is_fused}
    paths, kinds = list(fused), first_of_kind(list(fused.values()))
    found, failed = dict[str, SiteErrors](), dict[str, str]()
    for place, (path, layer) in enumerate(fused.items()):
        first = paths[kinds[place]]
        if (first == path or first in failed or extent.layers) and calls.get(path):
            errors = found[path] = layer_errors(layer, calls[path], metric)
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


def layer_errors(layer: FusedEncoderLayer, calls: Sequence[Call], metric: str) -> SiteErrors:
    """The errors of a fused layer on recorded calls. kernel_error and kernel_bound are in units."""
    own, original, moved = list[Pair](), list[Pair](), [0.0]
    least = bound_of(layer, next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32))
    with torch.no_grad():
        for call in calls:
            made, modules = _output(layer, call, layer.forward), _modules(layer, call)
            own.append((made, modules))
            original += [(made, one) for one in call.outputs[:1]]
            if units_apart(own[-1:]) > least:
                draws = (_modules(layer, one_rounding_away(call, seed)) for seed in range(DRAWS))
                moved += [units_apart([(draw, modules)]) for draw in draws]
    units = units_apart(own)
    return SiteErrors(units, max(least, AMPLIFIED * max(moved)), format_error(metric, original), units)


def _modules(layer: FusedEncoderLayer, call: Call) -> Tensor:
    return _output(layer, call, lambda *args, **kwargs: run_original(layer, *args, **kwargs))


def _output(layer: FusedEncoderLayer, call: Call, forward: Callable[..., Any]) -> Tensor:
    args, kwargs, _ = copied(call)
    return next(floats(forward(*args, **kwargs)))
