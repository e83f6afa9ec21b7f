"""Linear layers and embeddings with a quantised weight; activations stay float.

The weight is held as the canonical `q`, `scale` and `offset` (see quant/), or in the layout that the device's kernels
read: a `Pack` on a CPU, 4-bit `Tiles` on a GPU; of the same numbers, bit for bit. `weight` gives it back as floats in
the original's dtype and shape, for code that asks. Each class stands for nn.Linear, Conv1D or nn.Embedding alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels import cpu_pack
from accelpatch.kernels.cpu_pack import Pack
from accelpatch.kernels.fp8_linear import fp8_linear
from accelpatch.kernels.int4_linear import int4_linear
from accelpatch.kernels.int4_tiles import Tiles, untile
from accelpatch.kernels.int8_embedding import int8_embedding
from accelpatch.kernels.int8_linear import int8_linear
from accelpatch.kernels.packed_linear import arguments, packed_embedding, packed_linear
from accelpatch.kernels.tiled_int4_linear import tiled_int4_linear, tiles_for
from accelpatch.modules.replacement import take_over
from accelpatch.quant import fp8, int4, int8
from accelpatch.quant.weight import QuantizedWeight

CANONICAL = ("q", "scale", "offset")


class QuantizedModule(nn.Module):
    """What the quantised modules share: the weight, its float form, and moves between devices and dtypes.

    q[N, K] (or packed nibbles), scale[N, G], offset[N, G] or None; all None while `pack` holds the weight for a CPU, or
    `tiles` for a GPU. `like` is empty: it carries the device and the dtype of the weight that was replaced, and follows
    `model.to(...)` while `scale` keeps its precision. `source`: the module whose weight this one shares, where they are
    tied.
    """

    q: Tensor | None
    scale: Tensor | None
    offset: Tensor | None
    like: Tensor
    transposed: bool
    packable: bool
    pack: Pack | None
    tiles: Tiles | None
    source: QuantizedModule | None
    scale_dtype: torch.dtype
    offset_dtype: torch.dtype | None

    def hold(self, weight: QuantizedWeight | QuantizedModule, original: nn.Module, packable: bool) -> None:
        """Take `weight`, or that of another module, in place of the original's float parameter."""
        parameter = self._parameters.pop("weight")
        assert parameter is not None
        shared = isinstance(weight, QuantizedModule)
        self.transposed = type(original).__name__ == "Conv1D"
        self.packable, self.pack, self.tiles = packable, None, None
        self.__dict__["source"] = weight if shared else None  # no child: the tree has it already
        for name in CANONICAL:
            self.register_buffer(name, None if shared else getattr(weight, name))
        self.register_buffer("like", torch.empty(0, dtype=parameter.dtype, device=parameter.device), persistent=False)
        self.scale_dtype = weight.scale_dtype if isinstance(weight, QuantizedModule) else weight.scale.dtype
        offset = None if isinstance(weight, QuantizedModule) else weight.offset
        self.offset_dtype = None if offset is None else offset.dtype
        self._settle()

    @property
    def held(self) -> QuantizedModule:
        """The module that has the weight: this one, or the one that it is tied to."""
        return self if self.source is None else self.source

    def canonical(self) -> QuantizedWeight:
        """The weight as q, scale and offset; from a device's own layout they are made anew."""
        holder = self.held
        if holder.tiles is not None:
            q, scale, offset = untile(holder.tiles)
        elif holder.pack is not None:
            q, scale, offset = cpu_pack.unpack(holder.pack)
        else:
            assert holder.q is not None
            assert holder.scale is not None
            return QuantizedWeight(holder.q, holder.scale, holder.offset)
        return QuantizedWeight(q, scale.to(self.scale_dtype), None if offset is None else offset.to(self.offset_dtype))

    def dequantized(self) -> Tensor:
        """The weight as floats, `[N, K]` in the original's dtype."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight as floats in the original's shape; made anew at each access, so it costs time and memory."""
        full = self.dequantized()
        return full.t() if self.transposed else full

    def _pack(self, weight: QuantizedWeight) -> Pack:
        raise NotImplementedError

    def _tile(self, weight: QuantizedWeight) -> Tiles | None:
        """The layout of the kernels of a GPU, where the module is on one and they read another than the canonical."""
        return None

    def _settle(self) -> None:
        """Hold the weight in the layout of the device that the module is on."""
        if self.source is not None:
            return
        device = self.like.device
        packs = self.packable and device.type == "cpu"
        moved = self.tiles is not None and self.tiles.w.device != device
        if moved or (self.pack is not None and not packs):
            self._spread(self.canonical())
        if packs and self.pack is None:
            self.pack = self._pack(self.canonical())
            self.q = self.scale = self.offset = None
        elif not packs and self.tiles is None:
            self.tiles = self._tile(self.canonical())
            if self.tiles is not None:
                self.q = self.scale = self.offset = None

    def _spread(self, weight: QuantizedWeight) -> None:
        """Hold the canonical tensors, on the device that the module is on."""
        self.pack = self.tiles = None
        for name, tensor in zip(CANONICAL, weight, strict=True):
            self._buffers[name] = None if tensor is None else tensor.to(self.like.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; `model.half()` and the like do not round the scales, nor turn fp8 into it."""
        kept = {name: self._buffers[name] for name in CANONICAL}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        self._settle()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The canonical tensors, whatever layout is held."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in zip(CANONICAL, self.canonical(), strict=True):
            if tensor is not None:
                destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Take canonical tensors into whatever layout is held."""
        if self.source is not None:  # that one takes them
            for name in CANONICAL:
                state_dict.pop(prefix + name, None)
        elif self.pack is not None or self.tiles is not None:
            self._spread(self.canonical())
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._settle()

    def hand_back(self, original: nn.Module) -> None:
        """Bring the original to where this module was moved, before it takes its place again."""
        original.to(device=self.like.device, dtype=self.like.dtype)


class Int8WeightOnlyLinear(QuantizedModule):
    """y = x @ (q * scale)^T + bias: int8 weight, symmetric, one scale for each output channel or group along K."""

    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return int8.dequantize(self.canonical(), self.like.dtype)

    def _pack(self, weight: QuantizedWeight) -> Pack:
        return cpu_pack.pack_int8(weight.q, weight.scale)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        holder = self.held
        if holder.pack is not None:
            return packed_linear(x, *arguments(holder.pack, self.bias))
        assert holder.q is not None
        assert holder.scale is not None
        return int8_linear(x, holder.q, holder.scale, self.bias)


class Int4WeightOnlyLinear(QuantizedModule):
    """y = x @ w^T + bias: 4-bit weight in groups along K with a minimum, or symmetric where `offset` is None."""

    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return int4.dequantize(self.canonical(), self.like.dtype)

    def _pack(self, weight: QuantizedWeight) -> Pack:
        return cpu_pack.pack_int4(weight.q, weight.scale, weight.offset)

    def _tile(self, weight: QuantizedWeight) -> Tiles | None:
        return tiles_for(weight, self.like.dtype, self.like.device)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        if self.pack is not None:
            return packed_linear(x, *arguments(self.pack, self.bias))
        if self.tiles is not None:
            return tiled_int4_linear(x, *self.tiles, self.bias)
        assert self.q is not None
        assert self.scale is not None
        return int4_linear(x, self.q, self.scale, self.offset, self.bias)


class Fp8WeightOnlyLinear(QuantizedModule):
    """y = x @ (q * scale)^T + bias: 8-bit float weight, one scale for each output channel."""

    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return fp8.dequantize(self.canonical(), self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        assert self.q is not None
        assert self.scale is not None
        return fp8_linear(x, self.q, self.scale, self.bias)


class Int8Embedding(QuantizedModule):
    """Rows of an int8 table as floats; `embed_scale` is applied where the family has it (Gemma)."""

    def dequantized(self) -> Tensor:
        return int8.dequantize(self.canonical(), self.like.dtype)

    def _pack(self, weight: QuantizedWeight) -> Pack:
        return cpu_pack.pack_int8(weight.q, weight.scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids[...] int64 -> [..., K] in the dtype of the table that was replaced."""
        rows = self._rows(input_ids)
        factor = getattr(self, "embed_scale", None)
        if factor is None:
            return rows
        return rows * (factor.to(rows.dtype) if isinstance(factor, Tensor) else factor)

    def _rows(self, input_ids: Tensor) -> Tensor:
        holder = self.held
        if holder.pack is not None:
            return packed_embedding(input_ids, self.like.dtype, *arguments(holder.pack))
        assert holder.q is not None
        assert holder.scale is not None
        return int8_embedding(input_ids, holder.q, holder.scale, self.like.dtype)


def quantized(
    mixin: type[QuantizedModule], original: nn.Module, weight: QuantizedWeight | QuantizedModule, packable: bool = False
) -> Any:
    """`original` as `mixin`, holding `weight`, or sharing that of a module which is tied to it."""
    new = take_over(mixin, original)
    new.hold(weight, original, packable)
    return new
