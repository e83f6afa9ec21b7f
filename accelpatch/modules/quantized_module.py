"""A module's quantised weight: its layout on each device, its float form, moves, loading, and restoring the original.

The weight is held as the canonical `q`, `scale` and `offset` (see quant/), or with the same numbers in the layout that
the device's kernels read: a `Pack` on a CPU, 4-bit `Tiles` on a GPU. Reading `weight` gives floats in the original's
dtype and shape; floats written there are quantised again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.replacement import ROLE, STORED, without_casts
from accelpatch.quant.weight import AnyWeight, OrderedWeight, QuantizedWeight

CANONICAL = ("q", "scale", "offset")
Held = AnyWeight
NOT_WRITTEN = "and its original could not take another: load the float model to change weights"
OF_PEFT = "base_model.model."  # prefix of names in a PeftModel's state dict


class QuantizedModule(PackedWeight):
    """Base of the quantised modules: the weight, its float form, and moves between devices and dtypes.

    q[N, K] (or packed nibbles), scale[N, G], offset[N, G] or None; all None while `pack` (CPU) or `tiles` (GPU) holds
    the weight. order[K] int32: the input of each column, or None where they are in order. like: an empty tensor with
    the device and dtype of the replaced weight; it follows `model.to(...)` while `scale` keeps its precision. source:
    the tied module that owns the weight, or None. inherited: such a module owned the weight once. written: the weight
    has been written since the patch. dtypes: the dtypes that the model was cast to since the patch.
    """

    own_buffers: tuple[str, ...] = (*CANONICAL, "order", "like")
    #: names of the weight's tensors; those behind the first three stay beside any layout
    canonical_names: tuple[str, ...] = CANONICAL
    takes_order = False  # whether columns may be in another order than the inputs

    q: Tensor | None
    scale: Tensor | None
    offset: Tensor | None
    order: Tensor | None
    like: Tensor
    packable: bool
    pack: Pack | None
    tiles: Tiles | None
    source: QuantizedModule | None
    inherited = False
    scale_dtype: torch.dtype | None
    offset_dtype: torch.dtype | None
    written: bool
    dtypes: tuple[torch.dtype, ...]

    def hold(self, weight: Held | QuantizedModule, original: nn.Module, packable: bool) -> None:
        """Replace the original's float parameter by `weight`, or share the weight of another module. Raises KernelError
        for an order of columns that this module does not take."""
        order = weight.order if isinstance(weight, (QuantizedModule, OrderedWeight)) else None
        if order is not None and not self.takes_order:
            raise KernelError("order does not belong to this kind of weight: write the checkpoint again")
        parameter = self._parameters.pop("weight")
        assert parameter is not None
        shared = isinstance(weight, QuantizedModule)
        self.transposed = type(original).__name__ == "Conv1D"
        self.packable, self.pack, self.tiles = packable, None, None
        self.__dict__["source"] = weight if shared else None  # not as a child: it is in the module tree already
        self.canonical_names = weight.canonical_names if isinstance(weight, QuantizedModule) else weight._fields
        for name in dict.fromkeys((*self.canonical_names, "order")):
            self.register_buffer(name, None)
        self.register_buffer("like", torch.empty(0, dtype=parameter.dtype, device=parameter.device), persistent=False)
        self.trainable, self.written, self.dtypes = parameter.requires_grad, False, ()
        if not isinstance(weight, QuantizedModule):
            self._lay_out(weight)

    @property
    def held(self) -> QuantizedModule:
        """The module that owns the weight: this one, or the one that it is tied to."""
        return self if self.source is None else self.source

    def canonical(self) -> Any:
        """The weight as q, scale and offset, converted from the device's layout where needed."""
        order = self.held.order
        return QuantizedWeight(*self._canonical()) if order is None else OrderedWeight(*self._canonical(), order)

    def _canonical(self) -> tuple[Tensor, Tensor, Tensor | None]:
        holder = self.held
        if holder.tiles is not None:
            q, scale, offset = holder.tiles.unpack()
        elif holder.pack is not None:
            q, scale, offset = holder.pack.unpack()
        else:
            assert holder.q is not None
            assert holder.scale is not None
            return holder.q, holder.scale, holder.offset
        offset = None if offset is None else offset.to(holder.offset_dtype)
        return q, scale.to(holder.scale_dtype), offset

    def sizes(self, held: Any) -> list[int]:
        """[N, K] of a quantised weight."""
        return list(held.q.shape)

    def quantized_like(self, weight: Tensor, held: Any) -> Held:
        """Quantise a float weight [N, K] to the format and group size of `held`."""
        raise NotImplementedError

    def repack(self, weight: Tensor) -> None:
        """Quantise a new float weight [N, K]; a tied module writes into the one that owns the weight."""
        if self.source is not None:
            self.source.repack(weight)
            return
        held = self.canonical()
        if list(weight.shape) != self.sizes(held):
            raise KernelError(f"the weight is {list(weight.shape)} [N, K], and {self.sizes(held)} is packed here")
        self._take(self.quantized_like(weight.to(self.like.device), held))

    def _pack(self, weight: Any) -> Pack:
        raise NotImplementedError

    def _tile(self, weight: Any) -> Tiles | None:
        """The weight in a GPU layout where the module is on a GPU whose kernels need one; else None."""
        return None

    def _settle(self) -> None:
        """Convert the weight to the layout for the device that the module is on."""
        if self.source is not None:
            return
        packs = self.packable and self.like.device.type == "cpu"
        right = self.pack is not None if packs else self.pack is None
        if self.tiles is not None and self.tiles.w.device != self.like.device:
            right = False
        if not right or (self.pack is None and self.tiles is None):
            self._lay_out(self.canonical())

    def _lay_out(self, weight: Held) -> None:
        """Hold a weight in the layout for this device; nothing is changed where that fails."""
        device = self.like.device
        weight = type(weight)(*(None if tensor is None else tensor.to(device) for tensor in weight))  # type: ignore[arg-type]
        packs = self.packable and device.type == "cpu"
        pack, tiles = (self._pack(weight), None) if packs else (None, self._tile(weight))
        self.pack, self.tiles = pack, tiles
        self.scale_dtype = None if weight.scale is None else weight.scale.dtype
        self.offset_dtype = None if weight.offset is None else weight.offset.dtype
        for name, tensor in zip(self.canonical_names, weight, strict=True):
            packed = name in CANONICAL and (pack is not None or tiles is not None)
            self._buffers[name] = None if packed else tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model. Casts such as `model.half()` change neither scales nor fp8 values."""
        kept = {name: self._buffers[name] for name in self.canonical_names}
        dtype = self.like.dtype
        self.changed()
        super()._apply(fn, recurse)
        if self.like.dtype != dtype:
            self.dtypes = (*self.dtypes, self.like.dtype)
        without_casts(self, kept)
        self._settle()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the canonical tensors whatever the layout; for PEFT, whose files hold heads and embeddings, floats."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix.startswith(OF_PEFT) and vars(self).get(ROLE) in ("head", "embedding"):
            for name in self.canonical_names:
                destination.pop(prefix + name, None)
            destination[prefix + "weight"] = self.weight.detach()
            return
        for name, tensor in zip(self.canonical_names, self.canonical(), strict=True):
            if tensor is not None:
                destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Load a quantised weight, or a float one, which is quantised, into the layout of this device."""
        given = {name: state_dict.pop(prefix + name, None) for name in self.canonical_names}
        if given["q"] is None and given["scale"] is None and prefix + "weight" in state_dict:
            full = state_dict.pop(prefix + "weight")
            self._load(lambda: self.repack(full.detach().t() if self.transposed else full.detach()), prefix, errors)
        elif self.source is None:
            held = self.canonical()._asdict()
            lost = [name for name in self.canonical_names if held[name] is not None and given[name] is None]
            missing.extend(prefix + name for name in lost if strict)
            named = {name: held[name] if one is None else one.clone() for name, one in given.items()}
            self._load(lambda: self._take(type(self.canonical())(**named)), prefix, errors)
        layout = {name: self._buffers[name] for name in self.canonical_names}
        self.held.changed()
        self._buffers.update(dict.fromkeys(self.canonical_names))  # taken already
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._buffers.update(layout)

    def _load(self, take: Callable[[], None], prefix: str, errors: list[str]) -> None:
        """Run `take`; what it refuses is added to the errors that torch raises at the end of load_state_dict."""
        try:
            with torch.no_grad():
                take()
        except KernelError as error:
            errors.append(f"{prefix}weight: {error}")

    def _take(self, new: Held) -> None:
        """Hold another weight of the same format and shape. Raises KernelError for any other."""
        held = self.canonical()
        for name, one, other in zip(self.canonical_names, new, held, strict=True):
            if (one is None) != (other is None) or (one is not None and other is not None and one.shape != other.shape):
                shapes = [None if tensor is None else list(tensor.shape) for tensor in (one, other)]
                raise KernelError(f"{name} is {shapes[0]}, and {shapes[1]} is packed here")
        if new.q.dtype != held.q.dtype:  # bits of e4m3fn are other numbers in e4m3fnuz
            raise KernelError(f"q is {new.q.dtype}, and {held.q.dtype} is packed here")
        if not _same(new, held):
            if STORED in vars(self):
                raise KernelError(f"its weight is {vars(self)[STORED]} as stored, {NOT_WRITTEN}")
            self._lay_out(new)
            self.written = True

    def own(self) -> None:
        """Own the weight that was another module's until now."""
        holder = self.held
        holder.changed()
        for name in ("pack", "tiles", "scale_dtype", "offset_dtype", "written", "dtypes"):
            self.__dict__[name] = vars(holder)[name]
        self._buffers.update({name: holder._buffers[name] for name in (*self.canonical_names, "order")})
        self.__dict__["source"], self.inherited = None, True

    def hand_back(self, original: nn.Module) -> bool:
        """Move and cast the original's weight to this module's device and dtype before the original is put back.

        Returns whether the weight was written since the patch; if so, the original gets the values as the format
        rounded them.
        """
        with torch.inference_mode(False), torch.no_grad():
            return self._hand_back(original._parameters["weight"])

    def _hand_back(self, parameter: nn.Parameter | None) -> bool:
        assert parameter is not None
        self.held.changed()
        data = parameter.data
        if self.held.written:
            data = self.float_parameters()["weight"].data
        else:
            for dtype in self.dtypes:
                data = data.to(dtype)
        parameter.data = data.to(self.like.device, self.like.dtype)
        if not parameter.is_inference():
            parameter.requires_grad_(self.trainable)
        return self.held.written


def _same(one: Held, other: Held) -> bool:
    """Whether two quantised weights have the same format and the same values."""
    pairs = list(zip(one, other, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    return all(a is None or b is None or _same_bits(a, b) for a, b in pairs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or b.is_meta or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def take_over(model: nn.Module) -> None:
    """Let tied modules own their weight where the module that did is no longer in the model, so that the weight moves
    and is copied, saved and watched with the model."""
    inside = {id(module) for module in model.modules()}
    for module in model.modules():
        if isinstance(module, QuantizedModule) and module.source is not None and id(module.source) not in inside:
            module.own()


def packed_modules(model: Any) -> list[QuantizedModule]:
    """The modules of a model that own a pack, in the order in which a step reads them: the head is last."""
    owners = [m for m in model.modules() if isinstance(m, QuantizedModule) and m.source is None and m.pack is not None]
    return sorted(owners, key=lambda module: module is getattr(model, "lm_head", None))
