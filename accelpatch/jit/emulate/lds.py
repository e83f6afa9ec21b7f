"""The LDS of a workgroup: its bytes, which of them are written, and who touched them last, so that races show.

Two waves race on a byte where one writes it, another reads or writes it, and no barrier lies between. A barrier orders
only what is finished: a write that no s_waitcnt has made sure of counts as done after the barrier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from accelpatch.jit.emulate.assembly import Line
from accelpatch.jit.emulate.transfers import lane_of
from accelpatch.jit.emulate.wave import Array, Wave

NOBODY, SEVERAL = -1, -2


class Lds:
    """size: bytes. waves: of the workgroup (one has no races). strict: reads of unwritten bytes are errors."""

    def __init__(self, size: int, waves: int, strict: bool, poison: int) -> None:
        self.bytes_ = np.resize(np.frombuffer(poison.to_bytes(4, "little"), np.uint8), size).copy()
        self.size, self.strict, self.shared = size, strict, waves > 1
        self.written = np.zeros(size, bool)
        self.epoch = 0  # barriers passed
        self.lines: list[Line] = []
        self.numbers: dict[int, int] = {}
        self.writes = Trace(size)
        self.reads = Trace(size)
        self.atomic = np.zeros(size, bool)

    def load(self, w: Wave, line: Line, addresses: Array, size: int, lanes: Array, atomic: bool = False) -> Array:
        """uint8[n, size] at int64[n] byte addresses of the lanes that are set."""
        at = self._places(w, line, addresses, size, lanes)
        if self.strict and not self.written[at].all():
            lane = int(np.flatnonzero(~self.written[at].all(1))[0])
            raise line.fault(
                f"lane {lane_of(lanes, lane)} of wave {w.number}: it reads LDS at byte {int(addresses[lane])}, which "
                "nothing has written"
            )
        if self.shared:
            self._no_race(w, line, at, lanes, self.writes, "reads", "written", atomic)
            if not atomic:
                self._note(self.reads, w, line, at)
        return self.bytes_[at]

    def store(self, w: Wave, line: Line, addresses: Array, data: Array, lanes: Array, atomic: bool = False) -> None:
        """Write uint8[n, size]. atomic: of an atomic operation, which races with no other one."""
        at = self._places(w, line, addresses, data.shape[1], lanes)
        if self.shared:
            self._no_race(w, line, at, lanes, self.writes, "writes", "written", atomic)
            self._no_race(w, line, at, lanes, self.reads, "writes", "read", False)
            self._note(self.writes, w, line, at)
            self.atomic[at] = atomic
        self.bytes_[at] = data
        self.written[at] = True

    def later(self, w: Wave, line: Line, addresses: Array, size: int, wrote: bool) -> Callable[[], None] | None:
        """What a barrier calls where an access is not sure: it counts as done after the barrier."""
        if not self.shared:
            return None
        at = addresses[:, None] + np.arange(size)
        trace = self.writes if wrote else self.reads

        def move() -> None:
            own = at[trace.wave[at] == w.number]
            trace.epoch[own] = self.epoch + 1

        return move

    def _places(self, w: Wave, line: Line, addresses: Array, size: int, lanes: Array) -> Array:
        wrong = (addresses < 0) | (addresses + size > self.size)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise line.fault(
                f"lane {lane_of(lanes, at)} of wave {w.number}, workgroup {w.group.number}: the LDS address "
                f"{int(addresses[at]):#x} is out of bounds: the workgroup has {self.size} bytes of LDS"
            )
        return addresses[:, None] + np.arange(size)

    def _no_race(
        self, w: Wave, line: Line, at: Array, lanes: Array, other: Trace, verb: str, did: str, atomic: bool
    ) -> None:
        racing = (other.epoch[at] >= self.epoch) & (other.wave[at] != w.number)
        if atomic:
            racing &= ~self.atomic[at]
        if racing.any():
            lane, byte = (int(one[0]) for one in np.nonzero(racing))
            place = int(at[lane, byte])
            before, wave = self.lines[other.line[place]], int(other.wave[place])
            who = f"wave {wave}" if wave >= 0 else "several waves"
            raise line.fault(
                f"race on LDS: lane {lane_of(lanes, lane)} of wave {w.number} {verb} byte {place}, which {who} has "
                f"{did} by {before.text!r} ({before.place}), and no s_barrier, with an s_waitcnt lgkmcnt(0) before it, "
                "lies between"
            )

    def _note(self, trace: Trace, w: Wave, line: Line, at: Array) -> None:
        number = self.numbers.setdefault(id(line), len(self.lines))
        if number == len(self.lines):
            self.lines.append(line)
        others = (trace.epoch[at] >= self.epoch) & (trace.wave[at] != w.number)
        trace.wave[at] = np.where(others, SEVERAL, w.number)
        trace.epoch[at] = self.epoch
        trace.line[at] = number


class Trace:
    """Of each byte the last access of a kind: the epoch, the wave (or SEVERAL), the number of the line."""

    def __init__(self, size: int) -> None:
        self.epoch = np.full(size, -1, np.int64)
        self.wave = np.full(size, NOBODY, np.int16)
        self.line = np.zeros(size, np.int32)
