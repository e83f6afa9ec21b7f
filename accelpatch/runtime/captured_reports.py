"""What a choice reports to the host, copied over beside the step that follows it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Reports:
    """Copies of a report to the host, one at a time: each is taken before the next choice is queued.

    On a GPU they run on a stream of their own, so that nothing behind a choice waits for them; and since the host has
    taken a report when it queues the next choice, that one cannot write over what is still being copied. (After an
    exception it may: that copy is nobody's.)
    """

    def __init__(self, report: Tensor):
        self._report, device = report, report.device
        self._beside = _beside(device.index or 0) if device.type == "cuda" else None
        self._held = torch.empty(report.shape, dtype=torch.int64, device="cpu", pin_memory=self._beside is not None)
        if self._beside is not None:
            self._chosen, self._copied = torch.cuda.Event(), torch.cuda.Event()
            report.record_stream(self._beside)  # a copy that nobody takes may outlive the report's owner

    def send(self) -> None:
        """Queue a copy behind what the device was given so far on the current stream."""
        if self._beside is None:
            self._held.copy_(self._report)
            return
        self._chosen.record(torch.cuda.current_stream(self._report.device))
        self._beside.wait_event(self._chosen)
        with torch.cuda.stream(self._beside):
            self._held.copy_(self._report, non_blocking=True)
        self._copied.record(self._beside)

    def wait(self) -> Tensor:
        """What was sent last, int64; waits for that copy alone."""
        if self._beside is not None:
            self._copied.synchronize()
        return self._held.clone()


@functools.cache
def _beside(index: int) -> torch.cuda.Stream:
    """The stream of all copies of a GPU.

    Of a priority of its own: streams of one priority can be the same one, and a capture may be under way there.
    """
    return torch.cuda.Stream(index, priority=-1)
