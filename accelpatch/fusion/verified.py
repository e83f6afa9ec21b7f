"""Verifies fused layers as wholes: a prompt and two cached steps, by the code that generate() runs.

Each layer gets the rows that the original's layer had on the sample inputs, one row of tokens and a padded batch. Its
prompt fills a cache and its last tokens are decode steps over that cache. The result is compared with that of the
layer's own replaced modules, which compute the same in the same format: no element may be more than BOUND units of the
dtype's precision away (patching/verify.py). A layer that amplifies roundings more than that may be twice as far away as
its modules' own output moves when each input moves by one rounding, the most of a few random draws. One with
activations in 8 bits is judged by the precision of bfloat16 whatever its dtype: where a rounding falls on the other
side of a tie, a code is another one, and an output moves by a step of it (of int8 1/127). The distance from the
original is reported as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.cache_name import layer_argument
from accelpatch.fusion.decoder import layers_of, module_in
from accelpatch.fusion.fused_layer import PromptCall, StepCall
from accelpatch.fusion.fused_model import FusedModel
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.native_model import NativeModel
from accelpatch.fusion.rotary import AXES
from accelpatch.fusion.spread import computes_on
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.models.family import Family, family_of_layer
from accelpatch.patching.capture import Call, copied, floats
from accelpatch.patching.extent import Extent
from accelpatch.patching.stages import Captured
from accelpatch.patching.verify import UNITS, SiteErrors, format_error, units_apart

BOUND = 8  # units for a layer, which rounds several times
AMPLIFIED, DRAWS = 2, 4
SPARSE_DRAWS = 8  # a rounding may send a token to another expert
HIDDEN = "hidden_states"
STEPS = 2  # cached steps at the end of each sample
INDEX, OWN = "layer_idx", "_accelpatch"  # attributes in which layers of one kind differ

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """The rows of one layer on one sample: x, original[B, L, K], positions[B, L] and mask[B, L] int64."""

    x: Tensor
    original: Tensor
    modules: Tensor
    positions: Tensor
    mask: Tensor

    @property
    def prompt(self) -> int:
        """Number of tokens before the cached steps."""
        return max(self.x.shape[1] - STEPS, 0)


def layer_errors(
    model: Any, fused: FusedModel | NativeModel, place: int, calls: Sequence[Call],
    samples: Sequence[Mapping[str, Any]], metric: str,
) -> SiteErrors | None:  # fmt: skip
    """The errors of the fused layer at `place`; None where no recorded call can be run by steps.

    calls: those of the original layer, one for each of `samples`. kernel_error and kernel_bound are in units.
    """
    by: Any = _native_steps if isinstance(fused, NativeModel) else _fused_steps
    decoder = fused.decoder() if isinstance(fused, FusedModel) else module_in(model)
    layer, own, original, moved = layers_of(decoder)[place], list[Pair](), list[Pair](), [0.0]
    least = bound_of(layer, next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32))
    with torch.no_grad():
        for call, sample in zip(calls, samples, strict=True):
            rows = _rows(layer, call, sample)
            made = None if rows is None else by(decoder, fused, place, rows)
            if rows is None or made is None:
                continue
            kept = rows.mask.bool()
            own.append((made[kept], rows.modules[kept]))
            original.append((made[kept], rows.original[kept]))
            if units_apart(own[-1:]) > least:
                seeds = range(DRAWS if LayerDescription(layer).sparse is None else SPARSE_DRAWS)
                draws = (_output(layer, one_rounding_away(call, seed))[kept] for seed in seeds)
                moved += [units_apart([(draw, rows.modules[kept])]) for draw in draws]
    if not own:
        return None
    units, bound = units_apart(own), max(least, AMPLIFIED * max(moved))
    return SiteErrors(units, bound, format_error(metric, original), units)


def bound_of(layer: Any, dtype: torch.dtype) -> float:
    """The units that a layer may be away from its modules, where it amplifies no roundings."""
    codes = any(getattr(getattr(module, "layout", None), "whole_rows", False) for module in layer.modules())
    return BOUND * max(1.0, UNITS[torch.bfloat16] / UNITS[dtype]) if codes else float(BOUND)


def _output(layer: Any, call: Call) -> Tensor:
    """The output of a layer's module, without its hooks."""
    args, kwargs, _ = copied(call)
    return next(floats(layer.forward(*args, **kwargs)))


def one_rounding_away(call: Call, seed: int) -> Call:
    """The call with every element of its hidden states moved by one rounding, up or down."""
    x = call.args[0] if call.args else call.kwargs[HIDDEN]
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device) * 2 - 1
    x = x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype)
    return call._replace(args=(x, *call.args[1:])) if call.args else call._replace(kwargs=call.kwargs | {HIDDEN: x})


def _rows(layer: Any, call: Call, sample: Mapping[str, Any]) -> Rows | None:
    x = call.args[0] if call.args else call.kwargs.get(HIDDEN)
    positions, mask = call.kwargs.get("position_ids"), sample.get("attention_mask")
    family = family_of_layer(layer)
    if positions is None and isinstance(x, Tensor) and x.dim() == 3 and _counts(family, sample):
        positions = torch.arange(x.shape[1], device=x.device)[None]
    if not isinstance(x, Tensor) or x.dim() != 3 or not isinstance(positions, Tensor) or len(call.outputs) != 1:
        return None
    if family is None or family.layer is None or call.kwargs.get(layer_argument(layer)) is not None:
        return None
    shape, device = x.shape[:2], computes_on(layer)
    x, positions = x.to(device), positions.to(device)  # of a layer on another device than the one before
    if mask is not None and mask.shape != shape:
        return None
    shown = torch.ones(shape, dtype=torch.int64, device=x.device) if mask is None else mask.to(x.device, torch.int64)
    return Rows(x, call.outputs[0], _output(layer, call), positions.expand(shape).contiguous(), shown)


def _counts(family: Family | None, sample: Mapping[str, Any]) -> bool:
    """Whether the positions of a layer that gets none are 0, 1, 2, ...: those of a text have one value on all axes."""
    axes = family is not None and family.rotary is not None and family.rotary.tables in AXES
    return axes and sample.keys() <= {"input_ids", "attention_mask", "use_cache"}


def _fused_steps(decoder: Any, fused: FusedModel, place: int, rows: Rows) -> Tensor | None:
    """The layer's output [B, L, K] by prompt and steps."""
    layer = fused.layers[place]
    assert layer is not None
    (batch, length, width), shape = rows.x.shape, layer.attention
    if batch > fused.most:
        return None
    states = rows.x.new_zeros(2, batch, shape.kv_heads, length, shape.size)
    cache = _cache(decoder, states[0], states[1])
    made = list(_prompt(decoder, fused, place, rows, cache))
    with weight_prefetch():
        for token in range(rows.prompt, length):
            fused.sentinels.reset(batch)
            slot = torch.full((batch,), token, dtype=torch.int64, device=rows.x.device)
            earlier = rows.mask * (torch.arange(length, device=slot.device) < token)
            call = StepCall(decoder, cache, rows.positions[:, token : token + 1].contiguous(), slot, earlier)
            made.append(_whole(*fused.run(rows.x[:, token].contiguous(), call, places=[place]))[:, None])
    return torch.cat(made, dim=1).view(batch, length, width)


def _cache(decoder: Any, keys: Tensor, values: Tensor) -> Any:
    """A static cache of which one layer alone is used."""
    return SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=values)] * len(layers_of(decoder)))


def _prompt(decoder: Any, fused: FusedModel | None, place: int, rows: Rows, cache: Any) -> Iterator[Tensor]:
    """The output for the tokens before the steps; by the layer's module where no fused layers take prompts."""
    if rows.prompt:
        x, mask = rows.x[:, : rows.prompt], rows.mask[:, : rows.prompt]
        call = PromptCall(decoder, cache, rows.positions[:, : rows.prompt].contiguous(), None if mask.all() else mask)
        flat = x.flatten(0, 1).contiguous()
        if fused is None or fused.no_prompts is not None:
            yield call.by_module(flat, place).view_as(x)
        else:
            yield _whole(*fused.run(flat, call, places=[place])).view_as(x)


def _whole(x: Tensor, pending: Tensor | None) -> Tensor:
    return x if pending is None else x + pending


def _native_steps(decoder: Any, native: NativeModel, place: int, rows: Rows) -> Tensor:
    """The layer's output [B, L, K]: the prompt by its module, then native steps."""
    (batch, length, _), size, layer = rows.x.shape, native.shape.head_dim, native.layers[place]
    assert layer is not None
    states = torch.zeros(2, batch, layer.kv_heads(size), length, size)
    cache = _cache(decoder, states[0], states[1])
    made = list(_prompt(decoder, None, place, rows, cache))
    # between two absent layers, so that neither the embedding nor the head is part of it
    step = replace(native, layers=[None, layer, None]).step([states[0]] * 3, [states[1]] * 3)
    starts, tokens = rows.mask.ne(1).sum(1), torch.zeros(batch, dtype=torch.int64)
    for token in range(rows.prompt, length):
        hidden = rows.x[:, token].clone()
        slots, positions = torch.full_like(starts, token), rows.positions[:, token]
        step.part(tokens, slots, starts, positions, range(1, 2), hidden)
        made.append(hidden[:, None])
    return torch.cat(made, dim=1)


def first_of_kind(layers: Sequence[nn.Module]) -> list[int]:
    """Place of each layer -> that of the first one with the same modules, shapes and settings, such as a window."""
    first: dict[Any, int] = {}
    return [first.setdefault(_kind(layer), place) for place, layer in enumerate(layers)]


def _kind(layer: nn.Module) -> Any:
    return tuple(
        (
            name,
            type(module),
            tuple((own, tuple(p.shape)) for own, p in module._parameters.items() if p is not None),
            tuple(
                (own, value)
                for own, value in vars(module).items()
                if isinstance(value, (bool, int, float, str)) and own != INDEX and not own.startswith(OWN)
            ),
        )
        for name, module in layer.named_modules()
    )


def check_layers(
    model: Any, fused: FusedModel | NativeModel, calls: Mapping[int, Sequence[Call]], captured: Captured, metric: str,
    progress: Callable[[int, int], None], extent: Extent,
) -> tuple[dict[int, SiteErrors], dict[int, str]]:  # fmt: skip
    """(errors, why not) by place: of the fused layers that `extent` names, and of those that are over their bound.

    calls: place -> the original layer's calls, one for each sample of `captured`.
    """
    samples = captured.samples
    if isinstance(fused, FusedModel) and torch.cuda.is_available():  # steps prefetch weights, laid out by then
        for device in [None] if fused.spread is None else fused.spread.devices:
            torch.cuda.synchronize(device)
    decoder = fused.decoder() if isinstance(fused, FusedModel) else module_in(model)
    kinds = first_of_kind(list(layers_of(decoder)))
    places, found, failed = sorted(fused.places & calls.keys()), dict[int, SiteErrors](), dict[int, str]()
    for done, place in enumerate(places):
        first = kinds[place] == place or kinds[place] not in found or kinds[place] in failed
        if not (first or extent.every_layer):
            continue
        given, errors = calls[place], None
        if len(given) == len(samples):
            chosen = partial(extent.chosen, first=first, own=captured.own)
            errors = layer_errors(model, fused, place, chosen(given), chosen(samples), metric)
        if errors is not None:
            found[place] = errors
            if problem := over_bound(errors):
                failed[place] = problem
        progress(done + 1, len(places))
    return found, failed


def over_bound(errors: SiteErrors) -> str | None:
    """Why a fused layer must run its modules, or None."""
    assert errors.kernel_bound is not None
    if errors.units <= errors.kernel_bound:
        return None
    return (
        f"in a prompt and {STEPS} cached steps it is {errors.units:.3g} units of its dtype's precision from its "
        f"modules, and the bound is {errors.kernel_bound:.3g}"
    )
