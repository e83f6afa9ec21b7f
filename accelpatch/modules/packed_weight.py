"""A module whose weight is packed: no parameter, but a `weight` that is read and written as one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.modules.replacement import ON_DEMAND, PATH, Replacement
from accelpatch.modules.weight_view import WAY, UnpackedWeight, WeightView


class PackedWeight(Replacement):
    """A mixin of modules that hold their weight in a form of their own.

    transposed: the original holds its weight as [K, N]. trainable: whether the parameter required a gradient. like: a
    tensor of the weight's device and dtype.
    """

    transient = ("_unpacked", "_token")
    transposed = False
    trainable: bool
    like: Tensor
    _unpacked: weakref.ref[UnpackedWeight] | None = None
    _token: nn.Parameter | None = None

    @property
    def held(self) -> PackedWeight:
        """The module that has the weight: this one, or the one that it is tied to."""
        return self

    @property
    def is_packed(self) -> bool:
        """Whether the weight is no parameter now."""
        return True

    @property
    def weight(self) -> Tensor:
        """The float weight in the original's shape and dtype, unpacked for who asks, so it costs time and memory."""
        if not self.is_packed:
            return self._parameters["weight"]  # type: ignore[return-value]
        if torch.compiler.is_compiling():  # the graph reads it
            full = self.held.dequantized()
            return full.t() if self.transposed else full
        return self.held.unpacked_view(self.transposed)

    @weight.setter
    def weight(self, value: Any) -> None:
        """What was read here may be put back (PEFT does, when an adapter goes); anything else is refused."""
        own = None if self.held._unpacked is None else self.held._unpacked()
        if not isinstance(value, WeightView) or value.unpacked is not own:
            self.original(NOT_REPLACED).weight = value

    def dequantized(self) -> Tensor:
        """The weight as floats, `[N, K]` in the original's dtype."""
        raise NotImplementedError

    def repack(self, weight: Tensor) -> None:
        """Hold other numbers: weight[N, K], float. Raises KernelError, changing nothing, for those it cannot hold."""
        raise NotImplementedError

    def unpacked_view(self, transposed: bool = False) -> WeightView:
        """The float weight; everybody who looks while it is alive sees the same numbers in the same memory."""
        weight = None if self._unpacked is None else self._unpacked()
        if weight is None:
            with torch.inference_mode(False), torch.no_grad():
                weight = UnpackedWeight(self.dequantized(), self._write, self.original)
            self._unpacked = weakref.ref(weight)
        return weight.view(weight.floats.t() if transposed else weight.floats)

    def _write(self, weight: Tensor) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.repack(weight)
        except BaseException:
            self.changed()  # these floats are not the weight
            raise

    def changed(self) -> None:
        """Views of the weight that somebody holds are of numbers that it has no more: they may not be written."""
        old = None if self._unpacked is None else self._unpacked()
        if old is not None:
            old.write = self._outdated
        self._unpacked = None

    def _outdated(self, weight: Tensor) -> None:
        path = vars(self).get(PATH, "a packed layer")
        raise PatchError(f"{path}: this view of its weight is out of date; read the weight again, then write")

    @property
    def token(self) -> nn.Parameter:
        """Stands for the weight where only its identity counts: modules that are tied have the same one."""
        held = self.held
        if held._token is None or held._token.device != held.like.device:
            held.__dict__["_token"] = nn.Parameter(torch.empty(0, device=held.like.device), requires_grad=False)
        assert held._token is not None
        return held._token

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those that there are, and a token for the weight: PEFT finds ties by it."""
        yield from super().parameters(recurse)
        if self.is_packed:
            yield self.token

    def float_parameters(self) -> dict[str, nn.Parameter]:
        """The weight, where it is packed."""
        if not self.is_packed:
            return {}
        full = self.held.dequantized()
        full = full.t().contiguous() if self.transposed else full
        return {"weight": nn.Parameter(full, requires_grad=self.trainable)}

    def original(self, refusal: str) -> Any:
        """The original, where the model gives it back on demand (`accelpatch exec`). Raises PatchError elsewhere."""
        if ON_DEMAND in vars(self):
            return vars(self)[ON_DEMAND](self, "another weight")
        raise PatchError(f"{vars(self).get(PATH, 'a packed layer')}: {refusal}")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's, but for the packed weight, under its own name or another's (pruning)."""
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
        """As nn.Module's; the packed weight has the mark when it comes back."""
        self.trainable = requires_grad
        return super().requires_grad_(requires_grad)


def packed_in(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """(name, module) of all modules of a model whose weight is packed now, under each name that they have."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedWeight) and module.is_packed:
            yield name, module


NOT_REPLACED = (
    f"its weight is packed and cannot be replaced by another tensor; {WAY}, or write into it (weight.data.copy_)"
)
