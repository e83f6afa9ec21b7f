"""What a call computes from the sizes of pictures alone: computed once, before its graph is captured, constant in it.

A tower for pictures of any size reads the sizes on the host and makes positions, windows and lengths of sequences of
them, which no capture allows. None of that depends on anything but the sizes, so it is computed in a run before, and
the captured program finds it there. Such a graph is one of these sizes alone: they are part of its key (calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROUNDS = 4  # runs, after each of which tensors that were written are constants no more
#: functions whose results are constants, made of what the program itself says; others make memory for a kernel to
#: write, of which torch counts nothing, and a capture allows them
MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.arange})
#: names of functions that write their first argument, besides those that end in "_"
WRITING = frozenset({
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
})  # fmt: skip
#: beginnings of names of functions whose results are not the same each time, or may be written by a kernel
VARYING = ("rand", "normal", "bernoulli", "multinomial", "dropout", "empty", "zeros", "ones", "full", "new_")
SHARED = (Tensor.data.__get__,)  # type: ignore[attr-defined]  # writes into these results are not counted
PLAIN = (
    bool, int, float, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

Key = tuple[Any, ...]


class _Varies(Exception):
    """A value that does not depend on the sizes alone."""


class Constants(TorchFunctionMode):
    """Context manager over a program in this thread: what it computes from `sizes` alone is that of the run before.

    A result is known by the function and its arguments, so the order of calls does not matter, and one that the run
    before did not come to is computed as ever. Tensors that the program writes are no constants, nor is what it
    computes from those.
    """

    def __init__(self, sizes: Iterable[Tensor]):
        super().__init__()
        self._sizes = tuple(sizes)
        self._numbers: dict[Key, int] = {}  # of a function and its arguments; the same in every round
        self._written: set[int] = set()
        self._learning = False
        self._forget()

    def learn(self, program: Callable[[], Any]) -> Any:
        """Run the program, keep what it computes from the sizes alone, and return what it returns."""
        for _ in range(ROUNDS):
            self._forget()
            self._learning = True
            try:
                with self:
                    made = program()
            finally:
                self._learning = False
            written = {key[0] for one, key, version in self._known.values() if one._version != version}
            if not written:
                return made
            self._written |= written
        self._forget()  # and so nothing is constant
        return program()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:  # an iterator could be used but once
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        number = self._number(func, args, kwargs)
        if number is None:
            return func(*self._indexed(func, args), **kwargs)
        if number in self._results:
            return _fresh(self._results[number])
        made = func(*args, **kwargs)
        if self._learning and _can_be_kept(made):
            self._results[number] = _fresh(made)
            for place, one in enumerate(made if isinstance(made, tuple | list) else (made,)):
                if isinstance(one, Tensor):
                    self._know(one, (number, place))
        return made

    def _forget(self) -> None:
        self._results: dict[int, Any] = {}
        # id -> (the tensor, which keeps its id while it lives; its key; how often it had been written)
        self._known: dict[int, tuple[Tensor, tuple[int, int], int]] = {}
        self._copies: dict[tuple[int, Any], Any] = {}  # (id of a constant that is an index, what it is converted to)
        for place, one in enumerate(self._sizes):
            self._know(one, (-1, place))

    def _know(self, tensor: Tensor, key: tuple[int, int]) -> None:
        self._known.setdefault(id(tensor), (tensor, key, tensor._version))

    def _number(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
        """The number of a result that depends on the sizes alone; None for any other."""
        name = getattr(func, "__name__", "")
        writes = name in WRITING or (name[-1:] == "_" and name[-2:] != "__") or kwargs.get("out") is not None
        if not self._known or writes or name.startswith(VARYING) or func in SHARED:
            return None
        tensors: list[Tensor] = []
        try:
            key = (func, self._key(args, tensors), self._key(kwargs, tensors))
            number = self._numbers.setdefault(key, len(self._numbers)) if tensors or func in MAKERS else None
        except (_Varies, TypeError):  # a TypeError: of a function without a hash
            return None
        return None if number in self._written else number

    def _key(self, value: Any, tensors: list[Tensor]) -> Any:
        """What is equal for equal arguments; the constants among them are added to `tensors`."""
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                raise _Varies
            tensors.append(value)
            return Tensor, self._known[id(value)][1]
        if isinstance(value, tuple | list):
            return type(value), tuple(self._key(one, tensors) for one in value)
        if isinstance(value, dict):
            return dict, tuple((name, self._key(one, tensors)) for name, one in sorted(value.items()))
        if isinstance(value, slice):
            return slice, tuple(self._key(one, tensors) for one in (value.start, value.stop, value.step))
        if type(value) not in PLAIN:
            raise _Varies
        return type(value), value

    def _indexed(self, func: Any, args: Any) -> Any:
        """The arguments of a call, in which constants that index a tensor lie where it does, and the ends of slices on
        the host."""
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            return args
        tensor, index, *rest = args
        if isinstance(index, tuple):
            return tensor, tuple(self._index(tensor.device, one) for one in index), *rest
        return tensor, self._index(tensor.device, index), *rest

    def _index(self, device: torch.device, index: Any) -> Any:
        if isinstance(index, slice):
            return slice(*(self._converted(one, int) for one in (index.start, index.stop, index.step)))
        elsewhere = isinstance(index, Tensor) and index.device != device
        return self._converted(index, device) if elsewhere else index

    def _converted(self, value: Any, to: Any) -> Any:
        """A constant as a number, or on another device; any other value as it is."""
        if not isinstance(value, Tensor) or id(value) not in self._known:
            return value
        if self._learning:
            self._copies[id(value), to] = int(value) if to is int else value.to(to)
        return self._copies.get((id(value), to), value)


def _can_be_kept(made: Any) -> bool:
    """Whether a result consists of tensors and plain values."""
    if isinstance(made, tuple | list):
        return all(map(_can_be_kept, made))
    return isinstance(made, (Tensor, *PLAIN))


def _fresh(made: Any) -> Any:
    """A result whose lists are its caller's own."""
    return [_fresh(one) for one in made] if type(made) is list else made
