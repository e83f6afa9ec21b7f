"""A float view of a packed weight for other code: it reads as a tensor, and what is written to it is packed again.

Code that writes into a layer's weight (PEFT's merge, `weight.data += delta`, `nn.init`) writes into an unpacked copy,
which is then packed again, rounded to the format. Writes are detected by torch's version counter, so any operation and
any view counts. Writes that bypass torch's dispatch (a collective over the view, a raw pointer) are not detected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OF: Any = Tensor
_SET_DATA = _OF.data.__set__
_TO_NUMPY = (_OF.numpy, _OF.__array__)
_UNSEEN = (_OF.set_, _OF.resize_, _OF.__dlpack__)  # operations whose writes would be lost
_TRAINING = (_OF.requires_grad.__set__, _OF.requires_grad_, _OF.grad.__set__)
#: attributes and methods that do not use a tensor's values
_FACTS = frozenset({
    _OF.dtype.__get__, _OF.shape.__get__, _OF.device.__get__, _OF.ndim.__get__, _OF.layout.__get__,
    _OF.requires_grad.__get__, _OF.is_cuda.__get__, _OF.size, _OF.dim, _OF.numel, _OF.is_floating_point,
    _OF.element_size,
})  # fmt: skip
_plain = torch._C.DisableTorchFunctionSubclass
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # functorch wrappers have no storage
WAY = "call accelpatch.unpatch(model), change the weight, and patch again"


class UnpackedWeight:
    """The floats [N, K] of one packed weight, kept while any view of them is alive.

    computed: whether the values have been used, and not only the dtype, the shape and the like. write: called with the
    floats after a write, to pack them. original: called with a message for an unsupported operation; returns the
    original module to run it on, or raises PatchError. unpack: gives the values, with which `floats` is filled when
    they are first used: T5's MLP reads the dtype at every call, and unpacking takes longer than all its GEMMs. None:
    `floats` has its values.
    """

    def __init__(
        self, floats: Tensor, write: Callable[[Tensor], None], original: Callable[[str], nn.Module],
        unpack: Callable[[], Tensor] | None = None,
    ):  # fmt: skip
        self.floats, self.write, self.original = floats, write, original
        self.computed = False
        self._unpack, self._lock = unpack, threading.Lock()

    def fill(self) -> None:
        """Unpack the weight, where that was not done yet."""
        if self._unpack is None:
            return
        with self._lock, _plain(), torch.inference_mode(False), torch.no_grad():
            if self._unpack is not None:
                self.floats.copy_(self._unpack())
                self._unpack = None

    def view(self, part: Tensor) -> WeightView:
        """`part` of the floats as a WeightView, whose writes are packed."""
        with _plain():
            made: WeightView = part.as_subclass(WeightView)
        made.unpacked = self
        return made

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor shares the memory of the floats."""
        if type(tensor) is not Tensor or tensor.device != self.floats.device or _is_wrapped(tensor):
            return False
        if tensor.layout is not torch.strided:  # sparse ones have several storages, none of them this
            return False
        return tensor.untyped_storage().data_ptr() == self.floats.untyped_storage().data_ptr() != 0

    def set_data(self, view: WeightView, data: Tensor) -> None:
        """`view.data = data`. Nothing to do where data is the view's own memory (`view.data += 1`)."""
        self.fill()
        with _plain():
            if data.data_ptr() == view.data_ptr() and data.stride() == view.stride() and data.dtype == view.dtype:
                return
            if data.shape != view.shape:
                shapes = f"{list(view.shape)} and cannot become {list(data.shape)}"
                self.original(f"its packed weight is {shapes}; {WAY}").weight.data = data
                return
            view.copy_(data.detach())
        self.write(self.floats)


class WeightView(Tensor):
    """A float tensor unpacked from a packed weight. Results computed from it are plain tensors."""

    unpacked: UnpackedWeight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if isinstance(first := args[0] if args else None, WeightView):
            if func == _SET_DATA:
                return first.unpacked.set_data(first, args[1])
            if message := _refusal(func, args):
                return func(first.unpacked.original(message).weight, *args[1:], **options)
        views = [one for one in tree_leaves((args, options)) if isinstance(one, WeightView)]
        if func not in _FACTS:
            for view in views:
                view.unpacked.computed = True
                view.unpacked.fill()
        with _plain():
            before = [view._version for view in views]
            result = func(*args, **options)
            written = [v.unpacked for v, version in zip(views, before, strict=True) if v._version != version]
        for weight in dict.fromkeys(written):
            weight.write(weight.floats)
        if func in _TO_NUMPY:
            result.flags.writeable = False  # writes through it would not be detected
        weights = list(dict.fromkeys(view.unpacked for view in views))
        if type(result) in (tuple, list):
            return type(result)(_viewed(value, weights) for value in result)
        return _viewed(result, weights)

    def __getattr__(self, name: str) -> Any:
        """Attributes of another library's weight, such as bitsandbytes' quant_state, which PEFT's merge reads."""
        raise AttributeError(f"a packed weight has no {name}; {WAY}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        self.unpacked.fill()
        with _plain():
            return self.detach().as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.unpacked.fill()
        with _plain():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


def _refusal(func: Any, args: tuple[Any, ...]) -> str | None:
    """Why a call cannot take effect on a packed weight; None where it can."""
    if func in _TRAINING and (len(args) < 2 or isinstance(args[1], Tensor) or args[1]):
        return (
            "a packed weight cannot be trained; call accelpatch.unpatch(model), keep this layer in the recipe "
            "(replace: keep), or take a copy (weight.clone())"
        )
    if func in _UNSEEN:
        return f"{func.__name__} on a packed weight would be lost; {WAY}, or take a copy (weight.clone())"
    return None


def _viewed(value: Any, weights: list[UnpackedWeight]) -> Any:
    return next((weight.view(value) for weight in weights if weight.holds(value)), value)
