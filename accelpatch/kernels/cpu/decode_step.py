"""One decode step of a model as one native call: token ids in, logits out, over a static cache.

    hidden = embedding_norm(embedding[token] * embedding_scale + positions[position])
    each layer:  hidden += after_attention_norm(o(attention(rope(q, k, v of attention_norm(hidden)))))
                 hidden += cross_o(attention of cross_q(cross_norm(hidden)) to what an encoder gave)
                 hidden += after_mlp_norm(down(activation(gate) * up)) of mlp_norm(hidden)
    logits = softcap(head(final_norm(hidden)))

Parts and norms that a family does not have are left out, and a layer may have its norms of the sums (step_weights.py).
Everything but the weights is float32. The class keeps the packs, norms and cache alive; they remain the caller's to
read.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch, regions
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import (
    EXPERT_ACTIVATIONS,
    MAX_BATCH,
    MAX_THREADS,
    PLAIN,
    check,
    native,
    pointer,
    threads,
)
from accelpatch.kernels.cpu.step_encoded import StepEncoded
from accelpatch.kernels.cpu.step_weights import LayerWeights, NormWeight, StepShape
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.kv_states import BF16, FLOAT, FP8, INT8, States, format_of, tensors_of
from accelpatch.kernels.spec import Described, Spec

OP = "decode_step"
CACHE_FORMATS = (FLOAT, BF16, INT8, FP8)  # numbered as in the C interface
SCALES = ("key_scales", "value_scales")


@dataclass
class DecodeStep(Described):
    """keys, values: of each layer [max_batch, kv_heads, length, head_dim], float32 or in a format of
    layouts/kv_states.py, contiguous; the step writes into them.

    layers: None for a layer that never runs here, whose keys and values may be any; `part` skips it. rows: the most
    sequences. length: slots of the cache. tokens: the most tokens of a step over a cache of one sequence, which all are
    of that sequence, at slots that follow each other; 0: a token of each sequence. encoded: what an encoder gave to the
    layers that attend to it.

    Call it with int64 tensors of one entry per sequence. It is thread-safe: a second call waits for the first.
    """

    shape: StepShape
    layers: Sequence[LayerWeights | None]
    embedding: Pack
    head: Pack
    final_norm: NormWeight | None
    keys: Sequence[States]
    values: Sequence[States]
    tokens: int = 0
    encoded: StepEncoded | None = None
    rows: int = field(init=False)
    length: int = field(init=False)
    pages: int = field(default=0, init=False)
    handle: ctypes.c_void_p = field(default_factory=ctypes.c_void_p, init=False)
    _keep: list[object] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.rows, self.length = self.keys[0].shape[0], self.keys[0].shape[2]
        self._create()

    def _create(self) -> None:
        self._check()
        model = self._model()
        check(
            native().ap_step_create(ctypes.byref(model), MAX_THREADS, ctypes.byref(self.handle)), "this model's shapes"
        )
        # at the interpreter's exit the memory goes with the process: another thread may still be within the step
        weakref.finalize(self, native().ap_step_free, self.handle).atexit = False

    @property
    def facts(self) -> Hashable:
        """No choice depends on a step itself."""
        return None

    def __call__(
        self, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """logits float32 [B, vocabulary], written to `out` if given.

        tokens, slots, starts, positions: int64 [B]. Sequence b's token is written to slot slots[b] of the cache,
        attends to slots starts[b] .. slots[b] (starts[b]: number of left-padding slots), and gets the rotary embedding
        of positions[b]. With `tokens`, b counts tokens of the one sequence, which see each other's keys and values.
        """
        logits = torch.empty(tokens.shape[0], self.head.n, **PLAIN) if out is None else out
        self._run_layers([tokens, slots, starts, positions], range(len(self.layers)), None, logits)
        return logits

    def part(
        self, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, layers: range, hidden: Tensor
    ) -> Tensor | None:
        """Some layers of a step. A range that begins with the first layer starts at the embedding, one that ends with
        the last layer returns logits.

        hidden: float32 [B, hidden], the residual stream, read and updated in place. An empty range at either end is the
        embedding or the head alone.
        """
        if hidden.dtype != torch.float32 or tuple(hidden.shape) != (tokens.shape[0], self.shape.hidden):
            raise KernelError(f"hidden is float32 [{tokens.shape[0]}, {self.shape.hidden}], not {list(hidden.shape)}")
        last = layers.stop == len(self.layers)
        logits = torch.empty(tokens.shape[0], self.head.n, **PLAIN) if last else None
        self._run_layers([tokens, slots, starts, positions], layers, hidden, logits)
        return logits

    def _run_layers(self, places: list[Tensor], layers: range, hidden: Tensor | None, logits: Tensor | None) -> None:
        """Some layers as one call; while a profile is recorded one call each, so that their times are known. The first
        begins with the embedding, and the last goes on to the head."""
        if regions.recorder is None:
            return self._run(places, layers.start, layers.stop, hidden, logits)
        hidden = torch.empty(len(places[0]), self.shape.hidden, **PLAIN) if hidden is None else hidden
        end = len(self.layers)
        for place in layers:
            with regions.recorder.part(f"layer {place} and head" if place + 1 == end else f"layer {place}"):
                self._run(places, place, place + 1, hidden, logits if place + 1 == end else None)
        if not layers:
            with regions.recorder.part("embedding" if layers.stop == 0 else "head"):
                self._run(places, layers.start, layers.stop, hidden, logits)
        return None

    def _run(self, given: list[Tensor], first: int, last: int, hidden: Tensor | None, logits: Tensor | None) -> None:
        batch = given[0].shape[0]
        for tensor in given:
            if tensor.dtype != torch.int64 or tensor.shape != (batch,) or tensor.device.type != "cpu":
                raise KernelError(
                    f"tokens, slots, starts, positions are int64 [{batch}] on the CPU, not {tensor.dtype}"
                )
        if logits is not None and (
            logits.dtype != torch.float32 or logits.shape != (batch, self.head.n) or not logits.is_contiguous()
        ):
            raise KernelError(f"logits are contiguous float32 [{batch}, {self.head.n}]")
        dispatch.run(OP, spec, given[0].device, (self, *given, first, last, hidden, logits))

    def _check(self) -> None:
        s = self.shape
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            if reason := layer.why_not(s.hidden, s.head_dim) or self._why_not_encoded(index, layer):
                raise KernelError(f"layer {index} is none of a native step: {reason}")
            want = self._cache_shape(layer.kv_heads(s.head_dim))
            if format_of(self.keys[index]) != format_of(self.values[index]):
                raise KernelError(f"keys and values of layer {index} are in two formats: give both the same")
            for cache in (self.keys[index], self.values[index]):
                if cache.dtype != torch.float32 or tuple(cache.shape) != want or not cache.is_contiguous():
                    raise KernelError(
                        f"the step's cache is contiguous float32 {list(want)}, not {cache.dtype} {list(cache.shape)}"
                    )
        if self.tokens and (self.rows != 1 or not 1 <= self.tokens <= MAX_BATCH):
            raise KernelError(f"several tokens are 1 to {MAX_BATCH} of one sequence, not {self.tokens} of {self.rows}")
        if not 1 <= self.rows <= MAX_BATCH:
            raise KernelError(f"the native step takes 1 to {MAX_BATCH} sequences, not {self.rows}")

    def _why_not_encoded(self, index: int, layer: LayerWeights) -> str | None:
        if not layer.attends_to_encoder:
            return None
        if self.encoded is None:
            return "it attends to an encoder, which gave nothing"
        return self.encoded.why_not(index, layer.linears["cross_q"].n, self.shape.head_dim, self.tokens or self.rows)

    def _cache_shape(self, kv_heads: int) -> tuple[int, ...]:
        return self.rows, kv_heads, self.length, self.shape.head_dim

    def _cache_format(self, index: int) -> int:
        return CACHE_FORMATS.index(format_of(self.keys[index]))

    def _model(self) -> native_library.Model:
        s = self.shape
        made = (native_library.Layer * len(self.layers))(*map(self._layer, range(len(self.layers)), self.layers))
        self._keep += [made, self.embedding, self.head, *s.rope]
        model = native_library.Model(
            len(self.layers), s.hidden, s.head_dim, self.tokens or self.rows, self.length, made,
            self.embedding.struct(), self.head.struct(), self._norm(self.final_norm, s.hidden),
        )  # fmt: skip
        for i, (frequencies, scaling) in enumerate(s.rope):
            model.inverse_frequency[i], model.rope_scaling[i] = self._vector(frequencies, s.head_dim // 2), scaling
        model.embedding_scale, model.logits_softcap = s.embedding_scale, s.softcap
        model.one_sequence, model.pages = int(self.tokens > 0), self.pages
        self._ends(model)
        return model

    def _ends(self, model: native_library.Model) -> None:
        """Fill in what embeddings, scores and the attention to an encoder have beside the weights of layers."""
        s = self.shape
        if s.positions is not None:
            model.position_rows, model.positions = len(s.positions), self._vector(s.positions.reshape(-1))
        model.embedding_norm = self._norm(s.embedding_norm, s.hidden)
        if s.score_bias is not None:
            bias = s.score_bias(self.length)
            model.biased_heads, model.score_bias = len(bias), self._vector(bias.reshape(-1), len(bias) * self.length)
        if self.encoded is not None:
            model.encoded = self.encoded.struct()
            self._keep.append(self.encoded)

    def _layer(self, index: int, weights: LayerWeights | None) -> native_library.Layer:
        s, layer = self.shape, native_library.Layer()
        if weights is None:
            return layer
        for name, pack in weights.linears.items():
            setattr(layer, name, pack.struct())
        if weights.experts is not None:
            weights.experts.fill(layer)
        if weights.sinks is not None:
            layer.sinks = self._vector(weights.sinks, weights.linears["q"].n // s.head_dim)
        for name, norm in weights.norms.items():
            setattr(layer, name, self._norm(norm, s.head_dim if name in ("q_norm", "k_norm") else s.hidden))
        for states, code, scale in zip((self.keys, self.values), ("keys", "values"), SCALES, strict=True):
            for name, tensor in zip((code, scale), tensors_of(states[index]), strict=False):
                setattr(layer, name, pointer(tensor))
        layer.cache = self._cache_format(index)
        layer.window, layer.rope = weights.window, weights.rope
        layer.activation = EXPERT_ACTIVATIONS[weights.activation]
        layer.attention_scale, layer.attention_softcap = weights.scale, weights.softcap
        layer.cross_scale, layer.post = weights.cross_scale, int(weights.post)
        if weights.attends_to_encoder and self.encoded is not None:
            layer.cross_keys, layer.cross_values = map(pointer, self.encoded.states[index])
        self._keep.append(weights)
        return layer

    def _norm(self, norm: NormWeight | None, size: int) -> native_library.Norm:
        if norm is None:
            return native_library.Norm()
        bias = None if norm.bias is None else self._vector(norm.bias, size)
        return native_library.Norm(self._vector(norm.weight, size), bias, norm.eps, int(norm.layer))

    def _vector(self, tensor: Tensor, size: int | None = None) -> int | None:
        if size is not None and tensor.shape != (size,):
            raise KernelError(f"a vector of {size} was expected, not {list(tensor.shape)}")
        made = tensor.detach().to(torch.float32).contiguous()
        self._keep.append(made)
        return pointer(made)


def spec(step: DecodeStep, tokens: Tensor, *rest: object) -> Spec:
    """The Spec of the layers first .. last - 1 of a step, for dispatch."""
    return Spec(OP, {"B": tokens.shape[0]}, torch.float32)


def launch_(
    step: DecodeStep, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, first: int, last: int,
    hidden: Tensor | None, logits: Tensor | None,
) -> None:  # fmt: skip
    """The implementation `cpu`: run the layers first .. last - 1. Writes hidden and logits, where they are given.

    Raises IndexError, as an embedding does, for a token that it has no row for.
    """
    batch, ready = tokens.shape[0], [tensor.contiguous() for tensor in (tokens, slots, starts, positions)]
    status = native().ap_step_run(
        step.handle, batch, *map(pointer, ready), first, last, pointer(hidden), pointer(logits), threads()
    )
    if status and not bool(((tokens >= 0) & (tokens < step.embedding.n)).all()):
        raise IndexError(f"a token is out of range: {tokens.tolist()}, and the embedding has {step.embedding.n} rows")
    limits = f"at most {step.tokens or step.rows}, slots below {step.length}"
    check(status, f"layers {first} to {last} of a step of {batch} tokens ({limits})")
