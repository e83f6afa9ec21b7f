"""What an open If or loop keeps until it is closed: its blocks, and for conditions of vectors the masks of its lanes.

Lanes that leave by Break or Continue while others stay are taken out of every mask that would bring them back. What
follows them in the loop is a region of its own: its lanes are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from accelpatch.jit import selection, types
from accelpatch.jit.expressions import Condition
from accelpatch.jit.ir import Block, Region
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder


class Branch:
    """An If. mask: of a condition of vectors, the lanes that were there before it. around: of an Elif, what it is the
    Else of. next: where its other branch, or what follows it, begins."""

    def __init__(self, J: Builder, condition: Condition, around: Branch | None = None):
        self.J, self.around, self.region = J, around, J.region
        self.next = J.new_block("else")
        self.mask: Value | None = None
        self.left = False  # whether lanes left by Break or Continue
        self.crossed = False  # see Loop
        if condition.file == "s":
            selection.branch(J, condition, self.next, when=False)
        else:
            self._taken = selection.mask(J, condition)
            self.mask = J.temporary("s", types.U64)
            J.emit("s_and_saveexec_b64", self.mask, self._taken)
            J.jump("s_cbranch_execz", self.next)
            J.region = Region(self.region)

    @property
    def chain(self) -> list[Branch]:
        """Itself, and before it the Ifs that it is in the Else of."""
        return [*(self.around.chain if self.around else []), self]

    def otherwise(self) -> None:
        """Begin the other branch."""
        J, first = self.J, self.next
        self.next = J.new_block("join")
        if self.mask is None:
            J.jump("s_branch", self.next)
            J.start(first)
        else:
            J.start(first)
            J.emit("s_andn2_b64", "exec", self.mask, self._taken)
            J.jump("s_cbranch_execz", self.next)
            J.region = Region(self.region)

    def close(self) -> None:
        """End it: all lanes go on, but those that left."""
        self.J.start(self.next)
        if self.mask is not None:
            self.J.emit("s_mov_b64", "exec", self.mask)
            self.J.region = Region(self.region) if self.left else self.region
            if self.left:
                self.J.jump("s_cbranch_execz", self.after_leaving)
        if self.around is not None:
            self.around.close()

    def drop(self, after: Block) -> None:
        """Take the active lanes out, for good. after: where to go if no lane is left once it is closed."""
        assert self.mask is not None
        self.J.emit("s_andn2_b64", self.mask, self.mask, "exec")
        self.left, self.after_leaving = True, after


class Loop:
    """A loop, tested before its first round (unless ``entered``: it is known to run) and then at the end of each."""

    def __init__(self, J: Builder, condition: Condition | None, *, entered: bool = False):
        self.J, self.condition, self.region = J, condition, J.region
        self.head, self.next, self.out = J.new_block("loop"), J.new_block("next"), J.new_block("done")
        self.advance: Callable[[], None] = lambda: None
        self._before = J.block, len(J.block.instructions)
        self.mask: Value | None = None  # the lanes before the loop, where some can leave it earlier than others
        self._waiting: Value | None = None  # those that wait for the next round
        self._after: Block | None = None  # where to go if all lanes left a loop around this one
        self.crossed = False  # whether all lanes at once left a loop around this one
        if condition is not None and condition.file == "v":
            self._save()
            self._test(self.out, leave=True)
            J.region = Region(self.region)
        elif condition is not None and not entered:
            selection.branch(J, condition, self.out, when=False)
        self.inner = J.region
        J.start(self.head)

    def Break(self) -> None:
        self.J.Break(self)

    def Continue(self) -> None:
        self.J.Continue(self)

    def _save(self) -> None:
        """Keep the lanes that there were before the loop; it may already be open."""
        if self.mask is None:
            if self.crossed:
                fail("some lanes leave here, and all of them left the outer loop in the lines before: do that after")
            self.mask = self.J.temporary("s", types.U64)
            self._insert("s_mov_b64", self.mask, "exec")

    def _insert(self, name: str, *operands: Value | str) -> None:
        """Put an instruction before the loop."""
        J, (block, at) = self.J, self._before
        now, region = J.block, J.region
        later = block.instructions[at:]
        del block.instructions[at:]
        J.block, J.region = block, self.region
        J.emit(name, *operands)
        block.instructions += later
        J.block, J.region, self._before = now, region, (block, at + 1)

    def _test(self, to: Block, *, leave: bool) -> None:
        """Keep the lanes for which the condition holds."""
        assert self.condition is not None
        self.J.emit("s_and_b64", "exec", "exec", selection.mask(self.J, self.condition))
        self.J.jump("s_cbranch_execz" if leave else "s_cbranch_execnz", to)

    def leave(self, inside: Sequence[Branch | Loop], *, again: bool) -> None:
        """The active lanes leave it, or this round of it (again). inside: what has a mask between here and it."""
        J, to = self.J, self.next if again else self.out
        if not inside:
            J.jump("s_branch", to)
            return
        self._save()
        if again:
            if self._waiting is None:
                self._waiting = J.temporary("s", types.U64)
                self._insert("s_mov_b64", self._waiting, "0")
            J.emit("s_or_b64", self._waiting, self._waiting, "exec")
        for scope, outer in zip(inside, [self, *inside[:-1]], strict=True):
            scope.drop(outer.next)
        J.emit("s_mov_b64", "exec", "0")
        J.jump("s_branch", inside[-1].next)

    def drop(self, after: Block) -> None:
        """Take the active lanes out of it: they leave a loop around this one."""
        self._save()
        assert self.mask is not None
        self.J.emit("s_andn2_b64", self.mask, self.mask, "exec")
        self._after = after

    def close(self) -> None:
        """End a round, and the loop."""
        J = self.J
        J.region = self.inner
        J.start(self.next)
        if self._waiting is not None:
            J.emit("s_or_b64", "exec", "exec", self._waiting)
            J.emit("s_mov_b64", self._waiting, "0")
        if self.mask is not None and (self.condition is None or self.condition.file == "s"):
            J.jump("s_cbranch_execz", self.out)
        self.advance()
        if self.condition is None:
            J.jump("s_branch", self.head)
        elif self.condition.file == "v":
            self._test(self.head, leave=False)
        else:
            selection.branch(J, self.condition, self.head, when=True)
        J.start(self.out)
        J.region = self.region
        if self.mask is not None:
            J.emit("s_mov_b64", "exec", self.mask)
        if self._after is not None:
            J.region = Region(self.region)
            J.jump("s_cbranch_execz", self._after)
