"""Copies of weights in host memory, made by a thread of their own while the patch goes on beside it.

The driver's way to pageable memory goes through a small buffer, and one thread touches the fresh pages: slower than
everything else that a patch does. Here a chunk is on its way to one of two pinned buffers while all of torch's threads
copy the one before it out of the other, into huge pages where the system has them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.patching.plan import Plan

CHUNK = 1 << 26  # bytes of a pinned buffer
LARGE = 1 << 22  # bytes from which memory is asked for in huge pages: twice as many as one has


def rounded_weights(plan: Plan) -> list[nn.Parameter]:
    """The parameters of originals that a replacement rounds, where they do not lie on the CPU."""
    rounded = [entry.site for entry in plan.replaced if entry.replacer and entry.replacer.rounds]
    modules = [member.original for site in rounded for member in (site, *site.tied)]
    return [p for module in modules for p in module.parameters(recurse=False) if on_a_device(p)]


def on_a_device(parameter: nn.Parameter) -> bool:
    """Whether the way to the CPU is one between memories."""
    return parameter.device.type != "cpu"


class HostCopies:
    """Within the context copies of `tensors`, which nothing writes into meanwhile, are made one after the other.

    At its end the thread is gone, also where copies are still missing. Nothing is begun where there are no tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        given = {id(tensor): tensor.detach() for tensor in tensors}
        with _failing():
            self._copies = {key: _copy_of(tensor) for key, tensor in given.items()}
        self._thread = ThreadPoolExecutor(1, "accelpatch-originals")
        self._steps: list[Future[None]] = []
        self._left = [(self._copies[key], tensor) for key, tensor in given.items() if tensor.is_contiguous()]

    def __enter__(self) -> HostCopies:
        try:
            for device in dict.fromkeys(tensor.device for _, tensor in self._left):
                lane, there = _Lane(device), [pair for pair in self._left if pair[1].device == device]
                self._steps += [self._thread.submit(lane.send, chunk) for chunk in _chunks(there)]
                self._steps.append(self._thread.submit(lane.land))
        except BaseException:  # an interrupt too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copies.clear()
        self._left.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._copies

    def of(self, tensor: Tensor) -> Tensor:
        """The copy of one of the tensors, once all are finished."""
        return self._copies[id(tensor)]

    def finish(self, progress: Callable[[str, int, int], None]) -> None:
        """Wait for all of them. Raises PatchError where one could not be made."""
        for done, step in enumerate(self._steps):
            with _failing():
                step.result()
            progress("originals", done + 1, len(self._steps))


@contextmanager
def _failing() -> Iterator[None]:
    """Within it an error of the machine says what it means for the patch."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise PatchError(
            f"the originals' weights could not be copied to host memory ({type(error).__name__}: {reason}); "
            "nothing was changed. Free host memory, or patch with keep_original='none', which cannot be undone"
        ) from error


Pieces = list[tuple[Tensor, Tensor]]  # bytes in host memory, and those that are to come there


def _chunks(pairs: Pieces) -> Iterator[Pieces]:
    """The bytes of pairs of tensors (copy, original) in pieces, together as many as a buffer holds."""
    chunk: Pieces = []
    room = CHUNK
    for pair in pairs:
        copy, original = (tensor.view(-1).view(torch.uint8) for tensor in pair)
        start = 0
        while start < copy.numel():
            stop = min(start + room, copy.numel())
            chunk.append((copy[start:stop], original[start:stop]))
            room, start = room - (stop - start), stop
            if not room:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk


class _Lane:
    """The way from one device: a stream of its own, which begins after all that the device was given until now.

    A chunk takes few calls: for each one this thread has to wait until another gives up the interpreter.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Tensor] = []
        self._under_way: tuple[list[Tensor], list[Tensor], Any] | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, chunk: Pieces) -> None:
        """Fill the free buffer from the device, and meanwhile empty the other one."""
        pinned = self._stream is not None
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._buffers.reverse()
        here, there = map(list, zip(*chunk, strict=True))
        sizes = [len(piece) for piece in here]
        parts = list(self._buffers[0].split_with_sizes([*sizes, CHUNK - sum(sizes)]))[:-1]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            torch._foreach_copy_(parts, there, non_blocking=pinned)
        full = None if self._stream is None else self._stream.record_event()
        self.land()
        self._under_way = here, parts, full

    def land(self) -> None:
        """Empty the buffer that is under way, once it is full."""
        if self._under_way is not None:
            here, parts, full = self._under_way
            self._under_way = None
            if full is not None:
                full.synchronize()
            with torch.inference_mode():  # writes into tensors of either kind
                torch._foreach_copy_(here, parts)


def _copy_of(source: Tensor) -> Tensor:
    """What `_begun` gives; an inference tensor where the source is one, since a parameter must stay what it is."""
    with torch.inference_mode(source.is_inference()):
        return _begun(source)


def _begun(source: Tensor) -> Tensor:
    """Host memory for a copy, untouched: a page's first touch costs most, and a huge one little more than a small one.

    A tensor with gaps, or in another order than its memory, is copied at once.
    """
    if not source.is_contiguous():
        return source.to("cpu", copy=True)
    if source.nbytes < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(source.shape, dtype=source.dtype, device="cpu")  # whatever torch's default device is
    memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that has none says so
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(source.dtype).view(source.shape)
