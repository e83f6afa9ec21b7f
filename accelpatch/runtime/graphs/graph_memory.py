"""The memory that all graphs of one model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelpatch.modules.packed_weight import unpacked_once
from accelpatch.runtime.graphs.capture import GRAPHS, Graph, GraphOf, new_pool


class GraphMemory:
    """The memory that the graphs of one model share, from the first one on. devices: that they were captured on."""

    pool: Any = None

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()

    def graph(self, device: torch.device) -> GraphOf:
        """The function that captures programs on a device, leaving the state of its random generator as it was."""
        self.devices.add(device)
        if self.pool is None and device.type == "cuda":
            self.pool = new_pool(device)

        def capture(program: Callable[[], None]) -> Graph:
            devices = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(devices=devices, device_type="cuda"), torch.no_grad(), unpacked_once():
                return GRAPHS[device.type](program, device, self.pool)

        return capture
