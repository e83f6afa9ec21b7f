"""What replays a captured step: a CUDA (or HIP) graph. The table says which device types have one.

A program that is captured takes no arguments, reads and writes tensors that stay where they are, and never lets the
host wait for the device. Tests put `EagerGraph` into the table for the CPU: the same program, run anew each time.
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

WARM_UPS = 2  # runs before the capture: libraries choose their kernels in them
_ONE_AT_A_TIME = threading.RLock()  # captures of all models: they share a stream, and drop each other's workspaces


class _Captured(TorchFunctionMode):
    """What models do in Python that a graph holds badly, while they are captured in this thread.

    `torch.tensor` of a number writes it on the device: the copy from the host that it makes cannot be captured. A mask
    of booleans becomes one of floats once for all layers, not in every layer's attention. `x[..., [-2], :]` is a slice:
    the list would be copied too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # ids of what the program has made itself
        self.outside: list[Tensor] = []  # what else it reads, which the graph must keep: it holds addresses alone
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
    """A list of one number as the slice that takes the same."""
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


class Graph(Protocol):
    """A program made ready for one device; `pool` is shared by the graphs of one model."""

    def replay(self) -> None:
        """Run the program once, on the current stream."""


class CudaGraph:
    """The program's kernels, recorded once and launched together. Random numbers advance with each replay."""

    def __init__(self, program: Callable[[], None], device: torch.device, pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, torch.cuda.device(device):
            before, side = torch.cuda.current_stream(), _side_stream(device.index or 0)
            side.wait_stream(before)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
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
    """Leave cyclic garbage where it is: the graph of a dropped model, ended meanwhile, would break off a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _own_workspaces() -> None:
    """Let cuBLAS drop all its workspaces, so that a capture takes one from its pool's memory, and no one else keeps it.

    Others drop them too (torch.compile does): a graph captured with an older one, of the memory of all, would be left
    without. So would a graph that a program captures by itself on the very stream that it was warmed up on.
    """
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        clear()


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """The stream of all captures on a GPU: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(index)


def _mend(device: torch.device, pool: Any) -> None:
    """After a capture that broke off: torch's allocator and random generator still believe that it goes on.

    The allocator is notified; the generator learns it from the end of a capture that goes well.
    """
    with suppress(RuntimeError):  # where torch has done it already
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    with _no_collection(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_side_stream(device.index or 0)):
        torch.zeros(1, device=device)


class EagerGraph:
    """The program itself: for tests on devices without graphs."""

    def __init__(self, program: Callable[[], None], device: torch.device, pool: Any):
        for _ in range(WARM_UPS):  # what it leaves behind must not matter, as with a real capture
            program()
        self._program = program

    def replay(self) -> None:
        """Run the program, as it would be captured."""
        with _Captured():
            self._program()


#: device type of torch -> what its steps are captured with; "cuda" is ROCm too
GRAPHS: Mapping[str, type[CudaGraph] | type[EagerGraph]] = {"cuda": CudaGraph}


def new_pool(device: torch.device) -> Any:
    """Memory that the graphs of one model may share; they never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
