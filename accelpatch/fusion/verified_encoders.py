"""The runs by which the fused layers of encoders are verified (verified_laid_out.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from accelpatch.fusion.encoder_layer import FusedEncoderLayer
from accelpatch.fusion.verified import one_rounding_away
from accelpatch.fusion.verified_laid_out import Run
from accelpatch.modules.replacement import run_original
from accelpatch.patching.capture import Call, copied, floats


def encoder_layers(model: nn.Module) -> dict[str, FusedEncoderLayer]:
    """Dotted name -> layer, of those that a patch put into a model."""
    return {path: one for path, one in model.named_modules() if isinstance(one, FusedEncoderLayer)}


def encoder_runs(layer: FusedEncoderLayer, calls: Sequence[Call]) -> Iterator[Run]:
    """The layer and its modules on recorded calls of the original."""
    for call in calls:
        moved = partial(_moved, layer, call)
        yield Run(_output(layer, call, layer.forward), _modules(layer, call), call.outputs[:1], moved)


def _moved(layer: FusedEncoderLayer, call: Call, seed: int) -> Tensor:
    return _modules(layer, one_rounding_away(call, seed))


def _modules(layer: FusedEncoderLayer, call: Call) -> Tensor:
    return _output(layer, call, lambda *args, **kwargs: run_original(layer, *args, **kwargs))


def _output(layer: FusedEncoderLayer, call: Call, forward: Callable[..., Any]) -> Tensor:
    args, kwargs, _ = copied(call)
    return next(floats(forward(*args, **kwargs)))
