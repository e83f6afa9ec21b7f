"""Records any program as a CUDA (or HIP) graph; a table says which device types have them. A step's: step.py.

A captured program takes no arguments, reads and writes tensors at fixed addresses, and never synchronises with the
host. Tests register `EagerGraph` for the CPU, which runs the same program uncaptured.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accelpatch.kernels import regions

AT_MOST = "_accelpatch_at_most"  # attribute of a tensor of one number: the largest that it may be
ADDING, EXCEEDING = frozenset({"add", "__add__", "__radd__"}), frozenset({"gt", "__gt__"})  # names of functions
WARM_UPS = 2  # runs before the capture, in which libraries choose their kernels
_ONE_AT_A_TIME = threading.RLock()  # captures of all models: they share a stream, and drop each other's workspaces


class _Captured(TorchFunctionMode):
    """Context manager that makes some Python idioms of models capturable, in this thread.

    `torch.tensor` of a number would copy from the host: the number is written on the device instead. Boolean masks are
    converted to float once for all layers, not in each layer's attention. `x[..., [-2], :]` becomes a slice, since the
    index list would be copied from the host. `length + 2 > size`, where the length is on the device, is False where the
    largest one is too small for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # ids of tensors that the program itself makes
        self.outside: list[Tensor] = []  # other tensors that it reads: kept alive, as the graph has only addresses
        self._masks: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._keep((*args, *kwargs.values()))
        made = self._run(func, args, kwargs)
        self._made.update(id(one) for one in (made if isinstance(made, tuple | list) else (made,)))
        return made

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and id(value) not in self._made:
                self._made.add(id(value))
                self.outside.append(value)
            elif isinstance(value, tuple | list):
                self._keep(value)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.tensor and isinstance(args[0], bool | int | float):
            return torch.full((), *args, **kwargs)
        if getattr(args[0] if args else None, AT_MOST, None) is not None and type(args[-1]) is int:
            most, name = getattr(args[0], AT_MOST), getattr(func, "__name__", "")
            if name in EXCEEDING and most <= args[1]:
                return False
            made = func(*args, **kwargs)
            if name in ADDING:
                setattr(made, AT_MOST, most + args[1])
            return made
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            return func(args[0], tuple(map(_sliced, args[1])))
        mask = kwargs.get("attn_mask") if func is functional.scaled_dot_product_attention else None
        if mask is not None and mask.dtype == torch.bool:
            kwargs = kwargs | {"attn_mask": self._additive(mask, args[0].dtype)}
        return func(*args, **kwargs)

    def _additive(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(mask), dtype)
        if key not in self._masks:
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self._masks[key] = (mask, zeros.masked_fill_(~mask, float("-inf")))  # holds the mask, so that its id stays
        return self._masks[key][1]


def _sliced(index: Any) -> Any:
    """An index list of one number as the equal slice."""
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


class Graph(Protocol):
    """A program prepared for one device; the graphs of one model share `pool`."""

    def replay(self) -> None:
        """Run the program once on the current stream."""


#: captures a program for one device
GraphOf = Callable[[Callable[[], None]], Graph]


class CudaGraph:
    """A CUDA (HIP) graph: kernels recorded once and launched together. Random numbers advance with each replay."""

    def __init__(self, program: Callable[[], None], device: torch.device, pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.device(device):
            before, side = torch.cuda.current_stream(), _side_stream(device.index or 0)
            side.wait_stream(before)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS - 1):
                    program()
                with regions.program():
                    program()
            before.wait_stream(side)
            _own_workspaces()
            try:
                # other threads may go on allocating and copying meanwhile
                capture = torch.cuda.graph(self._graph, pool, side, capture_error_mode="thread_local")
                with _no_collection(), capture, _Captured() as seen:
                    program()
                self._outside = seen.outside
            except BaseException:
                torch.cuda.set_stream(before)
                _mend(device, pool)
                raise
            finally:
                _own_workspaces()

    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""
        self._graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Context manager: garbage collection off, since freeing a dropped model's graph would invalidate the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _own_workspaces() -> None:
    """Make cuBLAS drop its workspaces, so that the capture allocates one of its own in the graph's pool.

    Other code drops them too (torch.compile does), and a graph captured with an older workspace would then use freed
    memory. So would a graph that a program captures itself on the very stream that it was warmed up on.
    """
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        clear()


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """The stream for all captures on a GPU; only one, since libraries keep a workspace for every stream."""
    return torch.cuda.Stream(index)


def _mend(device: torch.device, pool: Any) -> None:
    """After a failed capture, reset torch's allocator and random generator, which believe that it still goes on.

    The allocator is notified directly; the generator recovers at the end of a successful capture.
    """
    with suppress(RuntimeError):  # where torch has done it already
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    with _no_collection(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_side_stream(device.index or 0)):
        torch.zeros(1, device=device)


class EagerGraph:
    """Runs the program uncaptured: for tests on devices without graphs."""

    def __init__(self, program: Callable[[], None], device: torch.device, pool: Any):
        for _ in range(WARM_UPS - 1):  # they change the state as a real capture's warm-ups do
            program()
        with regions.program():
            program()
        self._program = program

    def replay(self) -> None:
        """Run the program."""
        with _Captured():
            self._program()


#: device type of torch -> what its steps are captured with; "cuda" is ROCm too
GRAPHS: Mapping[str, type[CudaGraph] | type[EagerGraph]] = {"cuda": CudaGraph}


def new_pool(device: torch.device) -> Any:
    """A memory pool that the graphs of one model can share, since they never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
