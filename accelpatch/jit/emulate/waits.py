"""What a wave's counters still wait for, and which registers must not be touched until then.

The emulator moves data at once; a register that a load writes stays marked until a s_waitcnt makes sure of it. Vector
memory (vmcnt) and LDS (lgkmcnt) answer in order. Scalar loads do not, and a flat access counts in both counters in no
order with others: for these only a wait for zero helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from accelpatch.jit.emulate.assembly import Line
from accelpatch.jit.emulate.operands import name_of

#: kind of access -> the counters it stands in
COUNTERS = {"vector": ("vmcnt",), "lds": ("lgkmcnt",), "scalar": ("lgkmcnt",), "flat": ("vmcnt", "lgkmcnt"),
            "message": ("lgkmcnt",)}  # fmt: skip
IN_ORDER = {"vmcnt": "vector", "lgkmcnt": "lds"}
LIMITS = {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 7}


@dataclass(eq=False)
class Pending:
    """An access under way. registers: those it will write. open: counters that it still stands in."""

    kind: str
    line: Line
    registers: tuple[int, ...]
    open: set[str]
    unpublished: Callable[[], None] | None = None  # called when a barrier passes before the access is sure


class Waits:
    def __init__(self) -> None:
        self.queues: dict[str, list[Pending]] = {"vmcnt": [], "lgkmcnt": []}
        self.marked: dict[int, Pending] = {}

    def add(
        self, kind: str, line: Line, registers: Iterable[int] = (), unpublished: Callable[[], None] | None = None
    ) -> None:
        counters = COUNTERS[kind]
        pending = Pending(kind, line, tuple(registers), set(counters), unpublished)
        for counter in counters:
            self.queues[counter].append(pending)
        for register in pending.registers:
            self.marked[register] = pending

    def wait(self, counter: str, most: int) -> None:
        """No more than `most` accesses of the counter are under way from here on."""
        queue = self.queues[counter]
        finished = len(queue) - most
        if finished <= 0:
            return
        if most:
            ordered = [one for one in queue if one.kind == IN_ORDER[counter]]
            sure = ordered[: max(0, finished - (len(queue) - len(ordered)))]
        else:
            sure = list(queue)
        for one in sure:
            queue.remove(one)
            one.open.discard(counter)
            if not one.open:
                self._release(one)

    def _release(self, pending: Pending) -> None:
        for register in pending.registers:
            if self.marked.get(register) is pending:
                del self.marked[register]

    def check(self, line: Line, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Raise where an instruction touches a register that an access under way will still write."""
        for verb, registers in (("reads", reads), ("writes", writes)):
            for register in registers:
                if pending := self.marked.get(register):
                    counters = " and ".join(sorted(pending.open))
                    raise line.fault(
                        f"it {verb} {name_of(register)}, which {pending.line.text!r} ({pending.line.place}) is still "
                        f"loading: put an s_waitcnt for {counters} between them"
                    )

    def at_barrier(self) -> None:
        """A barrier passes; accesses that are not sure by now are not ordered by it."""
        for queue in self.queues.values():
            for one in queue:
                if one.unpublished:
                    one.unpublished()
