"""A module's quantised weight: its layout on each device, its float form, moves, loading, and restoring the original.

The weight is one `layout` (kernels/layouts/): the canonical rows, or the same numbers as the device's kernels read
them. Reading `weight` gives floats in the original's dtype and shape; floats written there are quantised again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.ops.linear.by_layout import laid_out
from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.replacement import ROLE, STORED
from accelpatch.quant.formats import dequantize, quantize_as
from accelpatch.quant.weight import PARTS

NOT_WRITTEN = "and its original could not take another: load the float model to change weights"
OF_PEFT = "base_model.model."  # prefix of names in a PeftModel's state dict


class QuantizedModule(PackedWeight):
    """Base of the quantised modules: the weight, its float form, and moves between devices and dtypes.

    layout: the weight[N, K] as it lies on this device; of a tied module that of its `source`, which owns the weight.
    packable: whether native CPU kernels were planned. like: an empty tensor with the device and dtype of the replaced
    weight; it follows `model.to(...)` while scales keep their precision. inherited: such a source owned the weight
    once. written: the weight has been written since the patch. dtypes: those that the model was cast to since.
    """

    own_buffers: tuple[str, ...] = ("like",)
    takes_order = False  # whether columns may be in another order than the inputs

    like: Tensor
    packable: bool
    own_layout: Any
    source: QuantizedModule | None
    inherited = False
    written: bool
    dtypes: tuple[torch.dtype, ...]

    def hold(self, weight: RowMajor | QuantizedModule, original: nn.Module, packable: bool) -> None:
        """Replace the original's float parameter by `weight`, or share the weight of another module. Raises KernelError
        for what the device's layout cannot hold, and for an order of columns that this module does not take."""
        order = weight.order if isinstance(weight, RowMajor) else weight.layout.order
        if order is not None and not self.takes_order:
            raise KernelError("order does not belong to this kind of weight: write the checkpoint again")
        parameter = self._parameters.pop("weight")
        assert parameter is not None
        self.transposed = type(original).__name__ == "Conv1D"
        self.packable, self.own_layout = packable, None
        # not as a child: it is in the module tree already
        self.__dict__["source"] = weight if isinstance(weight, QuantizedModule) else None
        self.register_buffer("like", torch.empty(0, dtype=parameter.dtype, device=parameter.device), persistent=False)
        self.trainable, self.written, self.dtypes = parameter.requires_grad, False, ()
        if isinstance(weight, RowMajor):
            self._lay_out(weight)

    @property
    def weight_owner(self) -> QuantizedModule:
        """The module that owns the weight: this one, or the one that it is tied to."""
        return self if self.source is None else self.source

    @property
    def layout(self) -> Any:
        """The weight as it lies in memory, a Layout."""
        return self.own_layout if self.source is None else self.source.own_layout

    @layout.setter
    def layout(self, value: Any) -> None:
        self.weight_owner.own_layout = value

    def canonical(self) -> Any:
        """The weight in its canonical layout, a RowMajor."""
        return self.layout.canonical()

    @property
    def weight_shape(self) -> tuple[int, int]:
        """As of PackedWeight."""
        return self.layout.n, self.layout.k

    def dequantized(self) -> Tensor:
        return dequantize(self.layout, self.like.dtype)

    def repack(self, weight: Tensor) -> None:
        """Quantise a new float weight [N, K]; a tied module writes into the one that owns the weight."""
        if self.source is not None:
            self.source.repack(weight)
            return
        present = self.canonical()
        if list(weight.shape) != [present.n, present.k]:
            raise KernelError(f"the weight is {list(weight.shape)} [N, K], and {[present.n, present.k]} is packed here")
        self._take(self._quantized_like(weight.to(self.like.device), present))

    def _quantized_like(self, weight: Tensor, present: Any) -> RowMajor:
        return quantize_as(weight, present)

    def _lay_out(self, weight: RowMajor) -> None:
        """Hold a weight in the layout for this device; nothing is changed where that fails."""
        device = self.like.device
        self.fill_views()
        self.own_layout = laid_out(weight.map(lambda one: one.to(device)), self.like.dtype, packable=self.packable)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model. Casts such as `model.half()` change neither scales nor fp8 values."""
        dtype = self.like.dtype
        self.changed()
        super()._apply(fn, recurse)
        if self.like.dtype != dtype:
            self.dtypes = (*self.dtypes, self.like.dtype)
        if self.source is None:
            moved = self.own_layout.w.device != self.like.device
            if moved or isinstance(self.own_layout, RowMajor):  # rows may get the layout of another dtype
                self._lay_out(self.own_layout.canonical())
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the canonical tensors whatever the layout; for PEFT, whose files hold heads and embeddings, floats."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix.startswith(OF_PEFT) and vars(self).get(ROLE) in ("head", "embedding"):
            destination[prefix + "weight"] = self.weight.detach()
            return
        for name, tensor in self.canonical().tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Load a quantised weight, or a float one, which is quantised, into the layout of this device."""
        present = self.canonical()
        names = present.tensors()
        given = {name: state_dict.pop(prefix + name) for name in PARTS if prefix + name in state_dict}
        if not given.keys() & {"q", "scale"} and prefix + "weight" in state_dict:
            full = state_dict.pop(prefix + "weight")
            self._load(lambda: self.repack(full.detach().t() if self.transposed else full.detach()), prefix, errors)
        elif self.source is None:
            missing.extend(prefix + name for name in names if strict and name not in given)
            unexpected.extend(prefix + name for name in given if strict and name not in names)
            new = {name: given[name].clone() if name in given else one for name, one in names.items()}
            self._load(lambda: self._take(present.with_tensors(new)), prefix, errors)
        self.weight_owner.changed()
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _load(self, take: Callable[[], None], prefix: str, errors: list[str]) -> None:
        """Run `take`; what it refuses is added to the errors that torch raises at the end of load_state_dict."""
        try:
            with torch.no_grad():
                take()
        except KernelError as error:
            errors.append(f"{prefix}weight: {error}")

    def _take(self, new: RowMajor) -> None:
        """Hold another weight of the same format and shape. Raises KernelError for any other."""
        present = self.canonical().tensors()
        for name, one in new.tensors().items():
            if one.shape != present[name].shape:
                raise KernelError(f"{name} is {list(one.shape)}, and {list(present[name].shape)} is packed here")
        if new.w.dtype != present["q"].dtype:  # bits of e4m3fn are other numbers in e4m3fnuz
            raise KernelError(f"q is {new.w.dtype}, and {present['q'].dtype} is packed here")
        if not all(_same_bits(one, present[name]) for name, one in new.tensors().items()):
            if STORED in vars(self):
                raise KernelError(f"its weight is {vars(self)[STORED]} as stored, {NOT_WRITTEN}")
            self._lay_out(new)
            self.written = True

    def own(self) -> None:
        """Own the weight that was another module's until now."""
        holder = self.weight_owner
        holder.changed()
        for name in ("own_layout", "written", "dtypes"):
            self.__dict__[name] = vars(holder)[name]
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
        self.weight_owner.changed()
        data = parameter.data
        if self.weight_owner.written:
            data = self.float_parameters()["weight"].data
        else:
            for dtype in self.dtypes:
                data = data.to(dtype)
        parameter.data = data.to(self.like.device, self.like.dtype)
        if not parameter.is_inference():
            parameter.requires_grad_(self.trainable)
        return self.weight_owner.written


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


def quantised_in(model: Any) -> list[QuantizedModule]:
    """The modules of a model that own a quantised weight, as a step reads them: the head is last."""
    found = [module for module in model.modules() if isinstance(module, QuantizedModule) and module.source is None]
    return sorted(found, key=lambda module: module is getattr(model, "lm_head", None))
