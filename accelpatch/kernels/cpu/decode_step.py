"""One decode step of a Llama-like model as one native call: token ids in, logits out, over a static cache.

    hidden = embedding[token] * embedding_scale
    each layer:  hidden += after_attention_norm(o(attention(rope(q, k, v of attention_norm(hidden)))))
                 hidden += after_mlp_norm(down(activation(gate) * up)) of mlp_norm(hidden)
    logits = softcap(head(final_norm(hidden)))

Norms that a family does not have are None. Everything but the weights is float32. The class keeps the packs, norms and
cache alive; they remain the caller's to read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import (
    LINEARS,
    MAX_BATCH,
    MAX_THREADS,
    NORMS,
    PLAIN,
    check,
    native,
    pointer,
    threads,
)
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.spec import Described, Spec

OP = "decode_step"


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer.

    linears: a Pack with its bias for each of LINEARS (q k v o gate up down). norms: name in NORMS -> float32 vector to
    multiply by (Gemma: 1 + weight); missing names are norms that the layer does not have. window: slots that attention
    looks back, 0 for all. rope: index into the step's rotary frequencies.
    """

    linears: dict[str, Pack]
    norms: dict[str, Tensor]
    window: int = 0
    rope: int = 0


@dataclass(frozen=True)
class StepShape:
    """Sizes and constants of the step.

    rope: (inverse frequencies[head_dim / 2], attention scaling), at most two. softcaps: 0 for none.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float
    attention_scale: float
    rope: tuple[tuple[Tensor, float], ...]
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0


@dataclass
class DecodeStep(Described):
    """keys, values: float32 [layers, max_batch, kv_heads, length, head_dim], contiguous; the step writes into them.

    layers: None for a layer that never runs here; `part` skips it.

    Call it with int64 tensors of one entry per sequence. It is thread-safe: a second call waits for the first.
    """

    shape: StepShape
    layers: Sequence[LayerWeights | None]
    embedding: Pack
    head: Pack
    final_norm: Tensor
    keys: Tensor
    values: Tensor
    handle: ctypes.c_void_p = field(default_factory=ctypes.c_void_p, init=False)
    _keep: list[object] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._check()
        model = self._model()
        check(
            native().ap_step_create(ctypes.byref(model), MAX_THREADS, ctypes.byref(self.handle)), "this model's shapes"
        )

    @property
    def facts(self) -> Hashable:
        """No choice depends on a step itself."""
        return None

    def __del__(self) -> None:
        if self.handle:
            native().ap_step_free(self.handle)

    def __call__(
        self, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """logits float32 [B, vocabulary], written to `out` if given.

        tokens, slots, starts, positions: int64 [B]. Sequence b's token is written to slot slots[b] of the cache,
        attends to slots starts[b] .. slots[b] (starts[b]: number of left-padding slots), and gets the rotary embedding
        of positions[b].
        """
        logits = torch.empty(tokens.shape[0], self.shape.vocabulary, **PLAIN) if out is None else out
        self._run([tokens, slots, starts, positions], 0, len(self.layers), None, logits)
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
        logits = torch.empty(tokens.shape[0], self.shape.vocabulary, **PLAIN) if last else None
        self._run([tokens, slots, starts, positions], layers.start, layers.stop, hidden, logits)
        return logits

    def write_only(self, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor) -> None:
        """As a call without logits: for all tokens of a prompt but the last."""
        self._run([tokens, slots, starts, positions], 0, len(self.layers), None, None)

    def _run(self, given: list[Tensor], first: int, last: int, hidden: Tensor | None, logits: Tensor | None) -> None:
        batch = given[0].shape[0]
        for tensor in given:
            if tensor.dtype != torch.int64 or tensor.shape != (batch,) or tensor.device.type != "cpu":
                raise KernelError(
                    f"tokens, slots, starts, positions are int64 [{batch}] on the CPU, not {tensor.dtype}"
                )
        if logits is not None and (
            logits.dtype != torch.float32
            or logits.shape != (batch, self.shape.vocabulary)
            or not logits.is_contiguous()
        ):
            raise KernelError(f"logits are contiguous float32 [{batch}, {self.shape.vocabulary}]")
        dispatch.run(OP, spec, given[0].device, (self, *given, first, last, hidden, logits))

    def _check(self) -> None:
        s = self.shape
        want = (len(self.layers), self.keys.shape[1], s.kv_heads, self.keys.shape[3], s.head_dim)
        for cache in (self.keys, self.values):
            if cache.dtype != torch.float32 or tuple(cache.shape) != want or not cache.is_contiguous():
                raise KernelError(
                    f"the step's cache is contiguous float32 {list(want)}, not {cache.dtype} {list(cache.shape)}"
                )
        if not 1 <= want[1] <= MAX_BATCH:
            raise KernelError(f"the native step takes 1 to {MAX_BATCH} sequences, not {want[1]}")
        if s.activation not in native_library.ACTIVATIONS:
            raise KernelError(f"the native step has no activation {s.activation!r}")

    def _model(self) -> native_library.Model:
        s = self.shape
        made = (native_library.Layer * len(self.layers))(
            *(self._layer(i, weights) for i, weights in enumerate(self.layers))
        )
        self._keep += [made, self.embedding, self.head, self.final_norm, *s.rope]
        model = native_library.Model(
            len(self.layers), s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.vocabulary,
            self.keys.shape[1], self.keys.shape[3], made, self.embedding.struct(),
            self.head.struct(), self._vector(self.final_norm, s.hidden),
        )  # fmt: skip
        for i, (frequencies, scaling) in enumerate(s.rope):
            model.inverse_frequency[i], model.rope_scaling[i] = self._vector(frequencies, s.head_dim // 2), scaling
        model.eps, model.embedding_scale, model.attention_scale = s.eps, s.embedding_scale, s.attention_scale
        model.attention_softcap, model.logits_softcap = s.attention_softcap, s.logits_softcap
        model.activation = native_library.ACTIVATIONS[s.activation]
        return model

    def _layer(self, index: int, weights: LayerWeights | None) -> native_library.Layer:
        s, layer = self.shape, native_library.Layer()
        if weights is None:
            return layer
        for name in LINEARS:
            setattr(layer, name, weights.linears[name].struct())
        for name in NORMS:
            size = s.head_dim if name in ("q_norm", "k_norm") else s.hidden
            setattr(layer, name, self._vector(weights.norms[name], size) if name in weights.norms else None)
        layer.keys, layer.values = pointer(self.keys[index]), pointer(self.values[index])
        layer.window, layer.rope = weights.window, weights.rope
        self._keep.append(weights)
        return layer

    def _vector(self, tensor: Tensor, size: int) -> int | None:
        if tensor.shape != (size,):
            raise KernelError(f"a vector of {size} was expected, not {list(tensor.shape)}")
        made = tensor.detach().to(torch.float32).contiguous()
        self._keep.append(made)
        return pointer(made)


def spec(
    step: DecodeStep, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, first: int, last: int,
    hidden: Tensor | None, logits: Tensor | None,
) -> Spec:  # fmt: skip
    """The Spec of the layers first .. last - 1 of a step, for dispatch."""
    return Spec(OP, {"B": tokens.shape[0]}, torch.float32)


def launch_(
    step: DecodeStep, tokens: Tensor, slots: Tensor, starts: Tensor, positions: Tensor, first: int, last: int,
    hidden: Tensor | None, logits: Tensor | None,
) -> None:  # fmt: skip
    """The implementation `cpu`: run the layers first .. last - 1. Writes hidden and logits, where they are given."""
    batch, ready = tokens.shape[0], [tensor.contiguous() for tensor in (tokens, slots, starts, positions)]
    status = native().ap_step_run(
        step.handle, batch, *map(pointer, ready), first, last, pointer(hidden), pointer(logits), threads()
    )
    limits = f"at most {step.keys.shape[1]}, slots below {step.keys.shape[3]}"
    check(status, f"layers {first} to {last} of a step of {batch} tokens ({limits})")
