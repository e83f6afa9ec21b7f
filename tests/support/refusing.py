"""A graph for tests on a CPU whose program may do no more than a CUDA capture allows.

On a GPU a capture fails where the host reads a tensor, and where a tensor is made from the host's memory. On a CPU all
of that works, so it is refused by the names of the functions, and by those that torch's dispatcher runs inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from accelpatch.runtime.graphs.capture import _Captured

#: names of functions that read a tensor on the host, or make one of what lies there
READING = frozenset({"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu"})
FROM_HOST = frozenset({"tensor", "as_tensor", "new_tensor", "from_numpy"})
#: on a CPU, where no device is said
MAKERS = (torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace, torch.eye)
#: of torch's dispatcher: they read values, or their results' sizes depend on values
INSIDE = ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "equal")


class Refused(RuntimeError):
    """What a CUDA capture would refuse too."""


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READING | FROM_HOST or (func in MAKERS and kwargs.get("device") is None):
            raise Refused(f"{name} in a captured program")
        if name == "repeat_interleave" and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None:
            raise Refused("repeat_interleave by lengths on the device in a captured program")
        index = args[1] if func in (Tensor.__getitem__, Tensor.__setitem__) else None
        if any(isinstance(one, list) for one in (index if isinstance(index, tuple) else (index,))):
            raise Refused("an index list in a captured program")
        return func(*args, **kwargs)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in INSIDE:
            raise Refused(f"{func} in a captured program")
        return func(*args, **(kwargs or {}))


class RefusingGraph:
    """As EagerGraph, with a program that is refused what a CUDA capture would."""

    def __init__(self, program: Callable[[], None], device: torch.device, pool: Any):
        program()  # to warm up
        self._program = program
        self.replay()

    def replay(self) -> None:
        """Run the program."""
        with _Functions(), _Captured(), _Dispatched():
            self._program()
