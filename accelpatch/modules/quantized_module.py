"""A quantised weight as a module holds it: its layout on a device, its float form, moves, loads and the way back.

The weight is held as the canonical `q`, `scale` and `offset` (see quant/), or in the layout that the device's kernels
read: a `Pack` on a CPU, 4-bit `Tiles` on a GPU; of the same numbers, bit for bit. `weight` gives it back as floats in
the original's dtype and shape, for code that asks; what is written there is rounded to the format again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError
from accelpatch.kernels import cpu_pack
from accelpatch.kernels.cpu_pack import Pack
from accelpatch.kernels.int4_tiles import Tiles, untile
from accelpatch.modules.weight_view import PackedWeight
from accelpatch.quant.weight import QuantizedWeight

CANONICAL = ("q", "scale", "offset")


class QuantizedModule(PackedWeight):
    """What the quantised modules share: the weight, its float form, and moves between devices and dtypes.

    q[N, K] (or packed nibbles), scale[N, G], offset[N, G] or None; all None while `pack` holds the weight for a CPU, or
    `tiles` for a GPU. `like` is empty: it carries the device and the dtype of the weight that was replaced, and follows
    `model.to(...)` while `scale` keeps its precision. `source`: the module whose weight this one shares, where they are
    tied. `written`: the numbers are no longer those of the original. `dtypes`: what the model was cast to since.
    """

    own_buffers = (*CANONICAL, "like")

    q: Tensor | None
    scale: Tensor | None
    offset: Tensor | None
    like: Tensor
    packable: bool
    pack: Pack | None
    tiles: Tiles | None
    source: QuantizedModule | None
    scale_dtype: torch.dtype
    offset_dtype: torch.dtype | None
    written: bool
    dtypes: tuple[torch.dtype, ...]

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
        self.trainable, self.written, self.dtypes = parameter.requires_grad, False, ()
        if not isinstance(weight, QuantizedModule):
            self._remember_dtypes(weight)
        self._settle()

    def _remember_dtypes(self, weight: QuantizedWeight) -> None:
        self.scale_dtype = weight.scale.dtype
        self.offset_dtype = None if weight.offset is None else weight.offset.dtype

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
        offset = None if offset is None else offset.to(holder.offset_dtype)
        return QuantizedWeight(q, scale.to(holder.scale_dtype), offset)

    def quantized_like(self, weight: Tensor, held: QuantizedWeight) -> QuantizedWeight:
        """A float weight[N, K] in the format, and the groups, of `held`."""
        raise NotImplementedError

    def repack(self, weight: Tensor) -> None:
        """Round other numbers to the format; a module that is tied to another writes into that one's."""
        held = self.canonical()
        new = self.quantized_like(weight.to(self.like.device), held)
        if not _same(new, held):
            self._remember_dtypes(new)
            self._spread(new)
            self._settle()
            self.written = True

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
        dtype, self.lent = self.like.dtype, None
        super()._apply(fn, recurse)
        if self.like.dtype != dtype:
            self.dtypes = (*self.dtypes, self.like.dtype)
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

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Take canonical tensors into whatever layout is held; or a float weight, which is rounded to the format."""
        holder, weight = self.held, state_dict.pop(prefix + "weight", None)
        if weight is not None and prefix + "q" not in state_dict:
            self._load_float(weight, prefix, errors)
            held = zip(CANONICAL, holder.canonical(), strict=True)
            state_dict.update({prefix + name: tensor for name, tensor in held if tensor is not None})
        holder.lent = None
        if self.source is not None:  # that one takes them
            for name in CANONICAL:
                state_dict.pop(prefix + name, None)
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
            return
        q, scale, offset = self.canonical()
        before = QuantizedWeight(q.clone(), scale.clone(), None if offset is None else offset.clone())
        if self.pack is not None or self.tiles is not None:
            self._spread(self.canonical())
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._settle()
        self.written = self.written or not _same(self.canonical(), before)

    def _load_float(self, weight: Tensor, prefix: str, errors: list[str]) -> None:
        full = weight.t() if self.transposed else weight
        due = self.held.dequantized().shape
        if full.shape != due:
            errors.append(f"size mismatch for {prefix}weight: {list(full.shape)} [N, K]; packed is {list(due)}")
            return
        try:
            with torch.no_grad():
                self.held.repack(full.detach())
        except KernelError as error:
            errors.append(f"{prefix}weight: {error}")

    def hand_back(self, original: nn.Module) -> bool:
        """Bring the original's weight to where this module was moved and cast, before it takes its place again.

        Returns whether the weight is other numbers than it was: those that were written here, as they were rounded.
        """
        parameter = original._parameters["weight"]
        assert parameter is not None
        data = parameter.data
        if self.held.written:
            data = self.float_parameters()["weight"].data
        for dtype in self.dtypes:
            data = data.to(dtype)
        parameter.data = data.to(self.like.device, self.like.dtype)
        return self.held.written


def _same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether two weights are the same numbers in the same format."""
    pairs = list(zip(one, other, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    return all(a is None or b is None or _same_bits(a, b) for a, b in pairs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or b.is_meta or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
