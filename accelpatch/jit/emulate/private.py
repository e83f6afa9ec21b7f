"""Private memory (scratch) of a wave's lanes: what a compiler puts where registers do not do."""

from __future__ import annotations

import numpy as np

from accelpatch.jit.emulate.assembly import Line
from accelpatch.jit.emulate.transfers import lane_of
from accelpatch.jit.emulate.wave import Array, Wave


class Private:
    """size: bytes of a lane, from the kernel's descriptor."""

    def __init__(self, size: int, strict: bool, poison: int) -> None:
        self.size, self.strict = size, strict
        self.bytes_ = np.resize(np.frombuffer(poison.to_bytes(4, "little"), np.uint8), (64, size)).copy()
        self.written = np.zeros((64, size), bool)

    def load(self, w: Wave, line: Line, addresses: Array, size: int, lanes: Array) -> Array:
        """uint8[n, size] at int64[n] offsets of the lanes that are set."""
        place = self._places(w, line, addresses, size, lanes)
        if self.strict and not self.written[place].all():
            lane = int(np.flatnonzero(~self.written[place].all(1))[0])
            raise line.fault(
                f"lane {lane_of(lanes, lane)} of wave {w.number}: it reads private memory at byte "
                f"{int(addresses[lane])}, which nothing has written"
            )
        return self.bytes_[place]

    def store(self, w: Wave, line: Line, addresses: Array, data: Array, lanes: Array) -> None:
        place = self._places(w, line, addresses, data.shape[1], lanes)
        self.bytes_[place] = data
        self.written[place] = True

    def _places(self, w: Wave, line: Line, addresses: Array, size: int, lanes: Array) -> tuple[Array, Array]:
        wrong = (addresses < 0) | (addresses + size > self.size)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise line.fault(
                f"lane {lane_of(lanes, at)} of wave {w.number}: the private address {int(addresses[at]):#x} is out of "
                f"bounds: a lane has {self.size} bytes"
            )
        return np.flatnonzero(lanes)[:, None], addresses[:, None] + np.arange(size)
