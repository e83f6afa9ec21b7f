"""Copies weights to host memory in a background thread while the patch goes on.

A plain `.to("cpu")` is slow: the driver stages pageable memory through a small buffer, and one thread takes the page
faults of the new memory. Here two pinned buffers alternate: the device fills one while all of torch's threads copy the
other one to its destination, in huge pages where the system has them.
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
    """The parameters of originals whose replacement rounds them, without those in host memory."""
    entries = (entry for entry in plan.replaced if entry.replacer and entry.replacer.rounds and not entry.as_stored)
    rounded = [site for entry in entries for site in entry.sites]
    modules = [member.original for site in rounded for member in (site, *site.tied)]
    return [p for module in modules for p in module.parameters(recurse=False) if on_a_device(p)]


def on_a_device(parameter: nn.Parameter) -> bool:
    """Whether a parameter is in device memory: neither in host memory nor offloaded (on the meta device)."""
    return parameter.device.type not in ("cpu", "meta")


class HostCopies:
    """Context manager that copies `tensors` to host memory in a thread; nothing may write into them meanwhile.

    Leaving the context stops the thread, even if copies are missing. Without tensors no thread starts.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        given = {id(tensor): tensor.detach() for tensor in tensors}
        with _copy_errors():
            self._copies = {key: _copy_of(tensor) for key, tensor in given.items()}
        self._thread = ThreadPoolExecutor(1, "accelpatch-originals")
        self._steps: list[Future[None]] = []
        self._pending = [(self._copies[key], tensor) for key, tensor in given.items() if tensor.is_contiguous()]

    def __enter__(self) -> HostCopies:
        try:
            for device in dict.fromkeys(tensor.device for _, tensor in self._pending):
                copier, pairs = _DeviceCopier(device), [pair for pair in self._pending if pair[1].device == device]
                self._steps += [self._thread.submit(copier.start_chunk, chunk) for chunk in _chunks(pairs)]
                self._steps.append(self._thread.submit(copier.finish_chunk))
        except BaseException:  # an interrupt too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copies.clear()
        self._pending.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._copies

    def of(self, tensor: Tensor) -> Tensor:
        """The copy of one of the tensors; only valid after `finish`."""
        return self._copies[id(tensor)]

    def finish(self, progress: Callable[[str, int, int], None]) -> None:
        """Wait for all copies, reporting progress. Raises PatchError where one could not be made."""
        for done, step in enumerate(self._steps):
            with _copy_errors():
                step.result()
            progress("originals", done + 1, len(self._steps))


@contextmanager
def _copy_errors() -> Iterator[None]:
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
    """The bytes of (copy, original) pairs, split and grouped into chunks of at most CHUNK bytes."""
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


class _DeviceCopier:
    """Copies chunks from one device by way of two pinned buffers, on a stream that first waits for the current stream.

    Each chunk takes few torch calls, because this thread waits for the interpreter lock at each one.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Tensor] = []
        self._in_flight: tuple[list[Tensor], list[Tensor], Any] | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def start_chunk(self, chunk: Pieces) -> None:
        """Start filling the free buffer from the device, and meanwhile finish the chunk before."""
        pinned = self._stream is not None
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._buffers.reverse()
        destinations, sources = map(list, zip(*chunk, strict=True))
        sizes = [len(piece) for piece in destinations]
        parts = list(self._buffers[0].split_with_sizes([*sizes, CHUNK - sum(sizes)]))[:-1]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            torch._foreach_copy_(parts, sources, non_blocking=pinned)
        filled = None if self._stream is None else self._stream.record_event()
        self.finish_chunk()
        self._in_flight = destinations, parts, filled

    def finish_chunk(self) -> None:
        """Wait until the device has filled its buffer, then copy that to its destinations; nothing without a chunk."""
        if self._in_flight is not None:
            destinations, parts, filled = self._in_flight
            self._in_flight = None
            if filled is not None:
                filled.synchronize()
            with torch.inference_mode():  # allows writes into inference tensors and others
                torch._foreach_copy_(destinations, parts)


def _copy_of(source: Tensor) -> Tensor:
    """Uninitialised host memory of the source's shape; from LARGE bytes in huge pages, which cost fewer page faults.

    A source that is not contiguous is copied at once. The copy is an inference tensor if and only if the source is one,
    since a parameter's data must stay of its kind.
    """
    with torch.inference_mode(source.is_inference()):
        if not source.is_contiguous():
            return source.to("cpu", copy=True)
        if source.nbytes < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")  # not torch's default device
        memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(source.dtype).view(source.shape)
