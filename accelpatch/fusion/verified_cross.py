"""The runs by which the fused decoder layers of encoder-decoders are verified (verified_laid_out.py).

Each gets the rows that the original's layer had on the sample inputs. Its modules fill the caches with all tokens but
the last of each row; that one is a step, once by the fused layer over static caches and once by the modules over a
copy. On a CPU it is one by the native step too, where the layer has a part in one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.cross_layer import CROSS_MASK, MASK, STATES, FusedCrossLayer
from accelpatch.fusion.cross_step import STEP, CrossCache, CrossStep
from accelpatch.fusion.native_encoder_decoder import head_size, native_layer, score_bias
from accelpatch.fusion.verified import HIDDEN
from accelpatch.fusion.verified_laid_out import Run
from accelpatch.kernels.attention_shape import Zeros
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import MAX_BATCH, PLAIN
from accelpatch.kernels.cpu.step_encoded import StepEncoded
from accelpatch.kernels.cpu.step_weights import LayerWeights, StepShape
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.models.encoders import part_of
from accelpatch.modules.replacement import run_original
from accelpatch.patching.capture import Call, floats


def cross_layers(model: nn.Module) -> dict[str, FusedCrossLayer]:
    """Dotted name -> layer, of those that a patch put into a model."""
    return {path: one for path, one in model.named_modules() if isinstance(one, FusedCrossLayer)}


def one_memory(layers: Mapping[str, FusedCrossLayer]) -> None:
    """Give the layers of a model one set of counters: they run one after the other."""
    memory = Zeros()
    for layer in layers.values():
        layer.__dict__["memory"] = memory


class Sample:
    """One recorded call of a layer as a step: x[B, 1, K], states[B, S, K] of the encoder, its mask, and caches that
    hold all tokens before. Masks of the decoder's own tokens are not verified: samples have none."""

    def __init__(self, layer: FusedCrossLayer, call: Call):
        given = {**dict(zip(layer.positional, call.args[1:], strict=False)), **call.kwargs}
        rows: Tensor = call.args[0] if call.args else given.pop(HIDDEN)
        self.layer, self.states, self.shown = layer, given[STATES], given.get(CROSS_MASK)
        self.place = int(part_of(layer, layer.form.own.module).layer_idx)
        self.x, before = rows[:, -1:], rows[:, :-1]
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for at in range(before.shape[1]):  # token by token: no mask is needed
            self._run(before[:, at : at + 1], self.caches)
        if not before.shape[1]:  # what the encoder gave must be cached
            self._run(self.x, made := EncoderDecoderCache(DynamicCache(), DynamicCache()))
            self.caches.cross_attention_cache = made.cross_attention_cache
            self.caches.is_updated[self.place] = True

    def _run(self, x: Tensor, caches: EncoderDecoderCache) -> Tensor:
        mask = None if self.shown is None else self.shown[:, :, -1:]
        given = {STATES: self.states, CROSS_MASK: mask, MASK: None, CACHE: caches}
        return next(floats(run_original(self.layer, x, **given)))

    def by_modules(self, x: Tensor) -> Tensor:
        """The output [B, 1, K] of the layer's modules."""
        return self._run(x, copy.deepcopy(self.caches))

    def fused(self) -> Tensor:
        """The output [B, 1, K] of the fused layer."""
        if not self.layer.by_steps:
            return self._step(copy.deepcopy(self.caches))
        (rows, _, _), own = self.x.shape, self.caches.self_attention_cache
        cross = self.caches.cross_attention_cache.layers[self.place]
        length = own.get_seq_length(self.place)
        shape, device = (rows, cross.keys.shape[1], length + 1, cross.keys.shape[3]), self.x.device
        keys, values = (torch.zeros(shape, dtype=self.x.dtype, device=device) for _ in range(2))
        if length:
            keys[:, :, :-1], values[:, :, :-1] = own.layers[self.place].keys, own.layers[self.place].values
        slot = torch.full((rows,), length, dtype=torch.int64, device=device)
        seen = torch.ones(rows, length + 1, dtype=torch.int64, device=device)
        states = torch.stack([cross.keys, cross.values])[None].expand(self.place + 1, *[-1] * 5).contiguous()
        mask = None if self.shown is None else _shown(self.shown[:, 0, -1], states.shape[4])
        read = CrossCache(states, mask)
        read.show()
        layers = [_Written(keys, values, slot)] * (self.place + 1)
        caches: Any = SimpleNamespace()
        step = CrossStep(slot[:, None], slot, seen, SimpleNamespace(layers=layers), read)
        setattr(caches, STEP, step)
        return self._step(caches)

    def native(self, weights: LayerWeights) -> Tensor:
        """The output [B, 1, K] of the layer in a native step."""
        own, cross = self.caches.self_attention_cache, self.caches.cross_attention_cache.layers[self.place]
        (rows, _, hidden), length, size = self.x.shape, own.get_seq_length(self.place), head_size(self.layer)
        keys, values = (torch.zeros(rows, weights.kv_heads(size), length + 1, size, **PLAIN) for _ in range(2))
        if length:
            keys[:, :, :-1], values[:, :, :-1] = own.layers[self.place].keys, own.layers[self.place].values
        mask, tokens, device = None, cross.keys.shape[2], cross.keys.device
        if self.shown is not None:
            mask = (1.0 - _shown(self.shown[:, 0, -1], tokens)) * torch.finfo(torch.float32).min
        ends, text = torch.full((rows,), tokens, device=device), torch.arange(rows, device=device)
        states = (cross.keys.contiguous(), cross.values.contiguous())
        encoded = StepEncoded([states] * 3, text, ends, mask)
        shape = StepShape(hidden, size, (), score_bias=score_bias(self.layer))
        absent = Pack.dense(torch.zeros(1, hidden, **PLAIN), None)
        layers = [None, weights, None]  # so that neither embedding nor head belong to it
        step = DecodeStep(shape, layers, absent, absent, None, [keys] * 3, [values] * 3, 0, encoded)
        none, slot = torch.zeros_like(text), torch.full_like(text, length)
        x = self.x[:, 0].clone()
        step.part(none, slot, none, slot, range(1, 2), x)
        return x[:, None]

    def _step(self, caches: Any) -> Tensor:
        mask = None if self.shown is None else self.shown[:, :, -1:]
        given = {STATES: self.states, CROSS_MASK: mask, MASK: None, CACHE: caches}
        return next(floats(self.layer.forward(self.x, **given)))


class _Written:
    """keys, values[B, H, L, D] of one layer; a step writes at `slot`."""

    def __init__(self, keys: Tensor, values: Tensor, slot: Tensor):
        self.keys, self.values, self._at = keys, values, int(slot[0])

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self._at], self.values[:, :, self._at] = key[:, :, 0], value[:, :, 0]
        return self.keys, self.values


def _shown(mask: Tensor, length: int) -> Tensor:
    """int64 [B, S]: 1 where a mask, bool or additive, shows a token."""
    seen = mask if mask.dtype == torch.bool else mask.eq(0)
    return seen.expand(-1, length).to(torch.int64).contiguous()


def cross_runs(layer: FusedCrossLayer, calls: Sequence[Call]) -> Iterator[Run]:
    """The layer and its modules on recorded calls of the original."""
    for call in calls:
        sample = Sample(layer, call)
        originals = [one[:, -1:] for one in call.outputs[:1]]
        modules, redrawn = sample.by_modules(sample.x), partial(_redrawn, sample)
        yield Run(sample.fused(), modules, originals, redrawn, sample.states.shape[1])
        if (weights := _native_of(layer)) is not None and len(sample.x) <= MAX_BATCH:
            yield Run(sample.native(weights), modules, originals, redrawn, sample.states.shape[1])


def _native_of(layer: FusedCrossLayer) -> LayerWeights | None:
    """The layer's weights for a native step; None where it has no part in one."""
    if layer.by_steps:
        return None
    try:
        return native_layer(layer)
    except CannotFuse:
        return None


def _redrawn(sample: Sample, seed: int) -> Tensor:
    return sample.by_modules(_moved(sample.x, seed))


def _moved(x: Tensor, seed: int) -> Tensor:
    """x with every element moved by one rounding, up or down."""
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device) * 2 - 1
    return x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype)
