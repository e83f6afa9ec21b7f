"""Copies of weights in host memory, made by a thread of their own while the patch goes on beside it.

The driver's way to pageable memory goes through a small buffer, and one thread touches the fresh pages: slower than
everything else that a patch does. Here a chunk is on its way to one of two pinned buffers while all of torch's threads
copy the one before it out of the other, into huge pages where the system has them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.patching.plan import Plan

CHUNK = 1 << 25  # bytes of a pinned buffer
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
        self._thread = ThreadPoolExecutor(1, "accelpatch-originals")
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        lanes = {device: _Lane(device) for device in {tensor.device for tensor in self._tensors}}
        self._copies: dict[int, Future[Tensor]] = {
            id(tensor): self._thread.submit(lanes[tensor.device].copied, tensor.detach()) for tensor in self._tensors
        }

    def __enter__(self) -> HostCopies:
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copies.clear()
        self._tensors.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._copies

    def of(self, tensor: Tensor) -> Tensor:
        """The copy of one of the tensors, once it is there. Raises PatchError where it could not be made."""
        try:
            return self._copies[id(tensor)].result()
        except (RuntimeError, MemoryError, OSError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise PatchError(
                f"the originals' weights could not be copied to host memory ({type(error).__name__}: {reason}); "
                "nothing was changed. Free host memory, or patch with keep_original='none', which cannot be undone"
            ) from error

    def finish(self, progress: Callable[[str, int, int], None]) -> None:
        """Wait for all of them. Raises PatchError where one could not be made."""
        for done, tensor in enumerate(self._tensors):
            self.of(tensor)
            progress("originals", done + 1, len(self._tensors))


class _Lane:
    """The way from one device: a stream of its own, which begins after all that the device was told until now."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Tensor] = []
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def copied(self, source: Tensor) -> Tensor:
        """A copy in pageable host memory."""
        if not source.is_contiguous():
            with torch.cuda.stream(self._stream):
                return source.to("cpu", copy=True)
        if not self._buffers:
            pinned = self._stream is not None
            self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        copy = _fresh(source)
        size = CHUNK // source.element_size()
        under_way: tuple[Tensor, Tensor, Any] | None = None
        for place, (there, here) in enumerate(zip(source.view(-1).split(size), copy.view(-1).split(size), strict=True)):
            buffer = self._buffers[place % 2].view(source.dtype)[: here.numel()]
            sent = here, buffer, self._send(there, buffer)
            _land(under_way)
            under_way = sent
        _land(under_way)
        return copy

    def _send(self, there: Tensor, buffer: Tensor) -> Any:
        """Fill a buffer from the device; what comes back says when it is full."""
        with torch.cuda.stream(self._stream):
            buffer.copy_(there, non_blocking=self._stream is not None)
        return None if self._stream is None else self._stream.record_event()


def _fresh(source: Tensor) -> Tensor:
    """Host memory for a copy, untouched: what a page costs at its first touch is most of what a small one costs."""
    if source.nbytes < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(source.shape, dtype=source.dtype)
    memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that has none says so
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(source.dtype).view(source.shape)


def _land(sent: tuple[Tensor, Tensor, Any] | None) -> None:
    """Empty a buffer into the memory that it is for, once it is full."""
    if sent is not None:
        here, buffer, full = sent
        if full is not None:
            full.synchronize()
        here.copy_(buffer)
