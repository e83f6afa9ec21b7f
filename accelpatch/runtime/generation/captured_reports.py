"""Copies a sampler's report to the host while the next step runs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Reports:
    """Asynchronous copies of a report to the host, one at a time: each is taken before the next sampler is queued.

    On a GPU they run on their own stream, so that nothing after the sampler waits for them. As the host takes a report
    before it queues the next sampler, that one cannot overwrite a report that is still being copied. (After an
    exception it may; that copy is not used.)
    """

    def __init__(self, report: Tensor):
        self._report, device = report, report.device
        self._beside = _beside(device.index or 0) if device.type == "cuda" else None
        self._held = torch.empty(report.shape, dtype=torch.int64, device="cpu", pin_memory=self._beside is not None)
        if self._beside is not None:
            self._chosen, self._copied = torch.cuda.Event(), torch.cuda.Event()
            report.record_stream(self._beside)  # a copy that nobody takes may outlive the report's owner

    def send(self) -> None:
        """Queue a copy after the work queued so far on the current stream."""
        if self._beside is None:
            self._held.copy_(self._report)
            return
        self._chosen.record(torch.cuda.current_stream(self._report.device))
        self._beside.wait_event(self._chosen)
        with torch.cuda.stream(self._beside):
            self._held.copy_(self._report, non_blocking=True)
        self._copied.record(self._beside)

    def wait(self) -> Tensor:
        """The report sent last, int64; waits for its copy only."""
        if self._beside is not None:
            self._copied.synchronize()
        return self._held.clone()


@functools.cache
def _beside(index: int) -> torch.cuda.Stream:
    """The stream for all copies from one GPU.

    It has a priority of its own: torch may hand out one stream twice for the same priority, and a capture may be going
    on there.
    """
    return torch.cuda.Stream(index, priority=-1)
