"""Copies weights to host memory in a background thread while the patch goes on.

A plain `.to("cpu")` is slow: the driver stages pageable memory through a small buffer, and one thread touches the fresh
pages. Here two pinned buffers alternate: one is filled by the device while all of torch's threads copy the other one to
its destination, in huge pages where the system has them.
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

CHUNK = 1 << 26  # bytes per pinned buffer
LARGE = 1 << 22  # bytes from which huge pages are used: two of them


def rounded_weights(plan: Plan) -> list[nn.Parameter]:
    """The parameters of originals whose replacement rounds them, those on a GPU only."""
    entries = (entry for entry in plan.replaced if entry.replacer and entry.replacer.rounds and not entry.as_stored)
    rounded = [site for entry in entries for site in entry.sites]
    modules = [member.original for site in rounded for member in (site, *site.tied)]
    return [p for module in modules for p in module.parameters(recurse=False) if on_a_device(p)]


def on_a_device(parameter: nn.Parameter) -> bool:
    """Whether a parameter is in another memory than the CPU's, and not offloaded."""
    return parameter.device.type not in ("cpu", "meta")


class HostCopies:
    """Context manager that copies `tensors` to host memory in a thread; nothing may write into them meanwhile.

    Leaving the context stops the thread, also where copies are still missing. Without tensors no thread starts.
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
        """The copy of one of the tensors; only valid after `finish`."""
        return self._copies[id(tensor)]

    def finish(self, progress: Callable[[str, int, int], None]) -> None:
        """Wait for all copies, reporting progress. Raises PatchError where one could not be made."""
        for done, step in enumerate(self._steps):
            with _failing():
                step.result()
            progress("originals", done + 1, len(self._steps))


@contextmanager
def _failing() -> Iterator[None]:
    """Context manager: turns memory and device errors into a PatchError that says what they mean for the patch."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise PatchError(
            f"the originals' weights could not be copied to host memory ({type(error).__name__}: {reason}); "
            "nothing was changed. Free host memory, or patch with keep_original='none', which cannot be undone"
        ) from error


Pieces = list[tuple[Tensor, Tensor]]  # (destination in host memory, source), as bytes


def _chunks(pairs: Pieces) -> Iterator[Pieces]:
    """The bytes of (copy, original) pairs, cut and grouped into chunks of at most CHUNK bytes."""
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
    """Copies from one device: a stream that starts after all work queued on the device so far, and two pinned buffers.

    Each chunk takes few torch calls, because this thread waits for the interpreter lock at each one.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Tensor] = []
        self._under_way: tuple[list[Tensor], list[Tensor], Any] | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, chunk: Pieces) -> None:
        """Start filling the free buffer from the device, and meanwhile copy the other one to its destination."""
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
        """Wait until the buffer in flight is filled, then copy it to its destination."""
        if self._under_way is not None:
            here, parts, full = self._under_way
            self._under_way = None
            if full is not None:
                full.synchronize()
            with torch.inference_mode():  # allows writes into inference tensors and others
                torch._foreach_copy_(here, parts)


def _copy_of(source: Tensor) -> Tensor:
    """Host memory of the source's shape, not touched yet; from LARGE bytes in huge pages, which cost fewer page faults.

    A source that is not contiguous is copied at once. An inference tensor if the source is one, since a parameter's
    data must stay of its kind.
    """
    with torch.inference_mode(source.is_inference()):
        if not source.is_contiguous():
            return source.to("cpu", copy=True)
        if source.nbytes < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")  # whatever torch's default device is
        memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(source.dtype).view(source.shape)
