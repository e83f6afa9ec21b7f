"""The float form of a packed weight, as code of others sees it: read as any tensor, written as a parameter.

What writes into a layer's weight (PEFT's merges, `weight.data += delta`, `nn.init`) writes into a tensor that was
unpacked for it. Here such a write goes back into the pack, rounded to its format. It is found by torch's own count of
writes, so that it does not matter which operation wrote, or through which view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accelpatch.errors import PatchError
from accelpatch.modules.replacement import Replacement

_OF: Any = Tensor
_REPLACING = (_OF.data.__set__, _OF.set_)
_TO_NUMPY = (_OF.numpy, _OF.__array__)
_TRAINING = (_OF.requires_grad.__set__, _OF.requires_grad_, _OF.grad.__set__)
_plain = torch._C.DisableTorchFunctionSubclass
WAY = "call accelpatch.unpatch(model), change the weight, and patch again"


class Loan:
    """The floats of one packed weight while somebody holds a view of them. floats: [N, K].

    write: takes the floats as they are after a write, and packs them. name: the layer's, for messages.
    """

    def __init__(self, floats: Tensor, write: Callable[[Tensor], None], name: str):
        self.floats, self.name = floats, name
        self._write = write

    def view(self, transposed: bool) -> WeightView:
        """The floats, or their transpose, as a tensor whose writes come back here."""
        return self.lend(self.floats.t() if transposed else self.floats)

    def lend(self, part: Tensor) -> WeightView:
        """A view of the floats as a tensor whose writes come back here."""
        with _plain():
            view: WeightView = part.as_subclass(WeightView)
        view.loan = self
        return view

    def lies_in(self, tensor: Any) -> bool:
        """Whether a tensor is a view of the floats."""
        if type(tensor) is not Tensor or tensor.device != self.floats.device:
            return False
        return tensor.untyped_storage().data_ptr() == self.floats.untyped_storage().data_ptr() != 0

    def written(self) -> None:
        """Pack the floats as they are now."""
        self._write(self.floats)

    def replace(self, view: WeightView, data: Tensor) -> None:
        """`view.data = data`; where these are the floats already (`view.data += 1`), they were packed by then."""
        with _plain():
            if data.data_ptr() == view.data_ptr() and data.stride() == view.stride() and data.dtype == view.dtype:
                return
            if data.shape != view.shape:
                raise PatchError(
                    f"{self.name}: its packed weight is {list(view.shape)} and cannot become {list(data.shape)}; {WAY}"
                )
            view.copy_(data.detach())
        self.written()


class WeightView(Tensor):
    """A float tensor that a packed weight was unpacked to. What is computed from it is a plain tensor."""

    loan: Loan

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        views = [one for one in tree_leaves((args, options)) if isinstance(one, WeightView)]
        if func in _TRAINING and isinstance(args[0], WeightView) and (len(args) < 2 or args[1] not in (False, None)):
            raise PatchError(
                f"{args[0].loan.name}: a packed weight cannot be trained; call accelpatch.unpatch(model), keep this "
                "layer in the recipe (replace: keep), or take a copy (weight.clone())"
            )
        if func in _REPLACING and isinstance(args[0], WeightView):
            return args[0].loan.replace(args[0], args[1])
        with _plain():
            before = [view._version for view in views]
            result = func(*args, **options)
            loans = [v.loan for v, version in zip(views, before, strict=True) if v._version != version]
        for loan in dict.fromkeys(loans):
            loan.written()
        if func in _TO_NUMPY:
            result.flags.writeable = False  # nobody would see a write through it
        lenders = list(dict.fromkeys(view.loan for view in views))
        if type(result) in (tuple, list):
            return type(result)(_lent(value, lenders) for value in result)
        return _lent(result, lenders)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with _plain():
            return self.detach().as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _plain():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


def _lent(value: Any, lenders: list[Loan]) -> Any:
    return next((loan.lend(value) for loan in lenders if loan.lies_in(value)), value)


class PackedWeight(Replacement):
    """A mixin: a module whose weight is packed, while it is no parameter.

    place: dotted name, set when the module moves in. transposed: the original holds its weight as [K, N]. trainable:
    whether its parameter required a gradient. lent: while somebody looks at the weight.
    """

    transient = ("lent",)
    place = "a packed layer"
    transposed = False
    trainable: bool
    lent: weakref.ref[Loan] | None = None

    @property
    def held(self) -> PackedWeight:
        """The module that has the weight: this one, or the one that it is tied to."""
        return self

    @property
    def is_packed(self) -> bool:
        """Whether the weight is no parameter now."""
        return "weight" not in self._parameters

    @property
    def weight(self) -> Tensor:
        """The float weight in the original's shape and dtype, unpacked for who asks, so it costs time and memory."""
        if not self.is_packed:
            return self._parameters["weight"]  # type: ignore[return-value]
        return self.held.lend(self.transposed)

    @weight.setter
    def weight(self, value: Any) -> None:
        """What was read here may be put back (PEFT does, when an adapter goes); anything else is refused."""
        own = self.held.lent() if self.held.lent is not None else None
        if not isinstance(value, WeightView) or value.loan is not own:
            self._refuse()

    def dequantized(self) -> Tensor:
        """The weight as floats, `[N, K]` in the original's dtype."""
        raise NotImplementedError

    def repack(self, weight: Tensor) -> None:
        """Hold other numbers: weight[N, K], float. Raises KernelError for values that the format cannot hold."""
        raise NotImplementedError

    def float_parameters(self) -> dict[str, nn.Parameter]:
        """The weight, where it is packed."""
        if not self.is_packed:
            return {}
        full = self.held.dequantized()
        full = full.t().contiguous() if self.transposed else full
        return {"weight": nn.Parameter(full, requires_grad=self.trainable)}

    def lend(self, transposed: bool = False) -> WeightView:
        """The float weight; everybody who looks while it is alive sees the same numbers in the same memory."""
        loan = self.lent() if self.lent is not None else None
        if loan is None:
            with torch.inference_mode(False), torch.no_grad():
                loan = Loan(self.dequantized(), self._write, self.place)
            self.lent = weakref.ref(loan)
        return loan.view(transposed)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's; `weight` is another object than a parameter, so one that is assigned is refused."""
        if name == "weight" and self.is_packed:
            self._refuse()
        super().register_parameter(name, param)

    def _refuse(self) -> NoReturn:
        raise PatchError(
            f"{self.place}: its weight is packed and cannot be replaced by another tensor; {WAY}, or write into it "
            "(weight.data.copy_)"
        )

    def _write(self, weight: Tensor) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.repack(weight)
        except BaseException:
            self.lent = None  # these floats are not the weight
            raise
