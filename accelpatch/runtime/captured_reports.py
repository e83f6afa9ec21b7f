"""What a step reports to the host, copied over while the next one runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Reports:
    """Copies of a report on the host, at most two under way; taking one waits for that copy alone."""

    def __init__(self, report: Tensor):
        self._report = report
        self._pinned = report.device.type == "cuda"
        self._under_way: list[tuple[Tensor, Any]] = []

    def send(self) -> None:
        """Queue a copy behind what the device was given so far."""
        held = torch.empty(self._report.shape, dtype=torch.int64, pin_memory=self._pinned)
        held.copy_(self._report, non_blocking=True)
        event = None
        if self._pinned:
            event = torch.cuda.Event()
            event.record()
        self._under_way.append((held, event))

    def take(self) -> Tensor:
        """The oldest one, int64."""
        held, event = self._under_way.pop(0)
        if event is not None:
            event.synchronize()
        return held.clone()
