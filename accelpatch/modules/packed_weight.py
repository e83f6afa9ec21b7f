"""Base of modules with a packed weight: not a parameter, but `weight` can still be read and written as floats."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.modules.replacement import ON_DEMAND, PATH, Replacement
from accelpatch.modules.weight_view import WAY, UnpackedWeight, WeightView

_CAPTURE = threading.local()  # kept: the weights that were read within `unpacked_once`


@contextmanager
def unpacked_once() -> Iterator[None]:
    """Context manager around a capture, with the runs before it: in this thread a weight that is asked only for its
    dtype, shape and the like (by T5's MLP) is unpacked once, and not in the graph.

    One that is computed with is unpacked in the graph, at each replay: its floats must be there then.
    """
    before, _CAPTURE.kept = getattr(_CAPTURE, "kept", None), []
    try:
        yield
    finally:
        _CAPTURE.kept = before


class PackedWeight(Replacement):
    """Mixin for modules that hold their weight in a packed format.

    transposed: the original stores its weight as [K, N]. trainable: whether the original's parameter required a
    gradient. like: a tensor with the weight's device and dtype.
    """

    transient = ("_unpacked", "_token")
    transposed = False
    trainable: bool
    like: Tensor
    _unpacked: weakref.ref[UnpackedWeight] | None = None
    _token: nn.Parameter | None = None

    @property
    def weight_owner(self) -> PackedWeight:
        """The module that owns the packed weight: this one, or the one that it is tied to."""
        return self

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed now, and not a parameter."""
        return True

    @property
    def weight(self) -> Tensor:
        """The float weight in the original's shape and dtype, unpacked when first computed with: that costs time and
        memory."""
        if not self.is_packed:
            return self._parameters["weight"]  # type: ignore[return-value]
        if torch.compiler.is_compiling():  # unpack inside the compiled graph
            full = self.weight_owner.dequantized()
            return full.t() if self.transposed else full
        return self.weight_owner.unpacked_view(self.transposed)

    @weight.setter
    def weight(self, value: Any) -> None:
        """Accept a view that was read here (PEFT assigns it back); pass any other value to the `original`."""
        own = None if self.weight_owner._unpacked is None else self.weight_owner._unpacked()
        if not isinstance(value, WeightView) or value.unpacked is not own:
            self.original(NOT_REPLACED).weight = value

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The weight [N, K] as floats in the original's dtype."""
        raise NotImplementedError

    def repack(self, weight: Tensor) -> None:
        """Pack a new float weight [N, K]. Raises KernelError, changing nothing, for values
        that the format cannot hold."""
        raise NotImplementedError

    def unpacked_view(self, transposed: bool = False) -> WeightView:
        """The float weight; while one view is alive, all callers share its memory, so they see each other's writes."""
        weight = None if self._unpacked is None else self._unpacked()
        kept = getattr(_CAPTURE, "kept", None)
        if weight is None or (kept is not None and weight.computed):
            with torch.inference_mode(False), torch.no_grad():
                floats = self.like.new_empty(self.weight_shape)
                made = UnpackedWeight(floats, self._write, self.original, self.dequantized)
            if weight is not None:  # the graph's own floats; other readers go on sharing theirs
                return made.view(made.floats.t() if transposed else made.floats)
            weight, self._unpacked = made, weakref.ref(made)
        if kept is not None:
            kept.append(weight)
        return weight.view(weight.floats.t() if transposed else weight.floats)

    def _write(self, weight: Tensor) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.repack(weight)
        except BaseException:
            self.changed()  # the view's floats differ from the packed weight
            raise

    def changed(self) -> None:
        """Invalidate existing views of the weight: writing into one of them raises PatchError from now on."""
        self.fill_views()
        old = None if self._unpacked is None else self._unpacked()
        if old is not None:
            old.write = self._outdated
        self._unpacked = None

    def fill_views(self) -> None:
        """Unpack the weight into existing views of it, before it changes."""
        old = None if self._unpacked is None else self._unpacked()
        if old is not None:
            old.fill()

    def _outdated(self, weight: Tensor) -> None:
        path = vars(self).get(PATH, "a packed layer")
        raise PatchError(f"{path}: this view of its weight is out of date; read the weight again, then write")

    @property
    def token(self) -> nn.Parameter:
        """An empty parameter that stands for the weight's identity; tied modules share one."""
        owner = self.weight_owner
        if owner._token is None or owner._token.device != owner.like.device:
            owner.__dict__["_token"] = nn.Parameter(torch.empty(0, device=owner.like.device), requires_grad=False)
        assert owner._token is not None
        return owner._token

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters, and `token` for the packed weight, by which PEFT detects ties."""
        yield from super().parameters(recurse)
        if self.is_packed:
            yield self.token

    def float_parameters(self) -> dict[str, nn.Parameter]:
        """The packed weight as a float parameter, under its name "weight"; {} where it is not packed."""
        if not self.is_packed:
            return {}
        full = self.weight_owner.dequantized()
        full = full.t().contiguous() if self.transposed else full
        return {"weight": nn.Parameter(full, requires_grad=self.trainable)}

    def original(self, refusal: str) -> Any:
        """Unpatch on demand and return the original (under `accelpatch exec`); else raise PatchError(refusal)."""
        if ON_DEMAND in vars(self):
            return vars(self)[ON_DEMAND](self, "another weight")
        raise PatchError(f"{vars(self).get(PATH, 'a packed layer')}: {refusal}")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; for the packed weight, also under another name (pruning), `original` refuses or takes it."""
        if self.is_packed and (name == "weight" or isinstance(param, WeightView)):
            self.original(NOT_REPLACED).register_parameter(name, param)
            return
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name == "weight" and self.is_packed:
            delattr(self.original(NOT_REPLACED), name)
            return
        super().__delattr__(name)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As in nn.Module; the packed weight gets the flag back when the model is unpatched."""
        self.trainable = requires_grad
        return super().requires_grad_(requires_grad)


def packed_in(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """(name, module) of every module in a model whose weight is packed now, under each of its names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedWeight) and module.is_packed:
            yield name, module


NOT_REPLACED = (
    f"its weight is packed and cannot be replaced by another tensor; {WAY}, or write into it (weight.data.copy_)"
)
