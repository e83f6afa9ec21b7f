"""The state of an open If or loop: its blocks, and for vector conditions the saved exec masks.

Lanes that leave by Break or Continue while others stay are cleared in every saved mask that would activate them again.
The code after that in the loop is a new region, as it runs with fewer lanes.

Both scopes have ``reconverge``, the block where lanes that are inactive in the scope's body become active again: the
Else of an If or what follows the If, and the end of a round of a loop.
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
    """An If. saved_exec: for a vector condition, exec as it was before. else_of: for an Elif, the If or Elif before."""

    def __init__(self, J: Builder, condition: Condition, else_of: Branch | None = None):
        self.J, self.else_of, self.region = J, else_of, J.region
        self.reconverge = J.new_block("else")
        self.saved_exec: Value | None = None
        self.some_left = False  # whether some lanes leave by Break or Continue
        self.left_uniformly = False  # whether a Break or Continue of all lanes leaves it, by a plain branch
        if condition.file == "s":
            selection.branch(J, condition, self.reconverge, when=False)
        else:
            self._then_lanes = selection.mask(J, condition)
            self.saved_exec = J.temporary("s", types.U64)
            J.emit("s_and_saveexec_b64", self.saved_exec, self._then_lanes)
            J.jump("s_cbranch_execz", self.reconverge)
            J.region = Region(self.region)

    @property
    def chain(self) -> list[Branch]:
        """The If and the Elifs up to this one, which are nested in each other's Else."""
        return [*(self.else_of.chain if self.else_of else []), self]

    def otherwise(self) -> None:
        """Begin the other branch."""
        J, first = self.J, self.reconverge
        self.reconverge = J.new_block("join")
        if self.saved_exec is None:
            J.jump("s_branch", self.reconverge)
            J.start(first)
        else:
            J.start(first)
            J.emit("s_andn2_b64", "exec", self.saved_exec, self._then_lanes)
            J.jump("s_cbranch_execz", self.reconverge)
            J.region = Region(self.region)

    def close(self) -> None:
        """End it: exec is restored, without the lanes that left."""
        self.J.start(self.reconverge)
        if self.saved_exec is not None:
            self.J.emit("s_mov_b64", "exec", self.saved_exec)
            self.J.region = Region(self.region) if self.some_left else self.region
            if self.some_left:
                self.J.jump("s_cbranch_execz", self._when_empty)
        if self.else_of is not None:
            self.else_of.close()

    def remove_lanes(self, when_empty: Block) -> None:
        """The active lanes leave a loop around it: clear them in the saved mask. when_empty: where to jump at the end
        of the If if no lane is left."""
        assert self.saved_exec is not None
        self.J.emit("s_andn2_b64", self.saved_exec, self.saved_exec, "exec")
        self.some_left, self._when_empty = True, when_empty


class Loop:
    """A loop. Its condition is tested before the first round, unless ``entered`` says that this one always runs, and at
    the end of each. saved_exec: exec as it was before the loop, where lanes can leave at different times."""

    def __init__(self, J: Builder, condition: Condition | None, *, entered: bool = False):
        self.J, self.condition, self.region = J, condition, J.region
        self.head, self.reconverge, self.exit = J.new_block("loop"), J.new_block("next"), J.new_block("done")
        self.advance: Callable[[], None] = lambda: None
        self._before = J.block, len(J.block.instructions)
        self.saved_exec: Value | None = None
        self._continued: Value | None = None  # lanes that wait at a Continue for the next round
        self._when_empty: Block | None = None  # where to jump after the loop if all lanes have left a loop around it
        self.left_uniformly = False  # as in Branch
        if condition is not None and condition.file == "v":
            self._save()
            self._test(self.exit, leave=True)
            J.region = Region(self.region)
        elif condition is not None and not entered:
            selection.branch(J, condition, self.exit, when=False)
        self.inner = J.region
        J.start(self.head)

    def Break(self) -> None:
        self.J.Break(self)

    def Continue(self) -> None:
        self.J.Continue(self)

    def _save(self) -> None:
        """Save exec before the loop, even if part of its body has been emitted."""
        if self.saved_exec is None:
            if self.left_uniformly:
                fail("some lanes leave here, and all of them left the outer loop in the lines before: do that after")
            self.saved_exec = self.J.temporary("s", types.U64)
            self._insert("s_mov_b64", self.saved_exec, "exec")

    def _insert(self, name: str, *operands: Value | str) -> None:
        """Insert an instruction before the loop."""
        J, (block, at) = self.J, self._before
        now, region = J.block, J.region
        later = block.instructions[at:]
        del block.instructions[at:]
        J.block, J.region = block, self.region
        J.emit(name, *operands)
        block.instructions += later
        J.block, J.region, self._before = now, region, (block, at + 1)

    def _test(self, to: Block, *, leave: bool) -> None:
        """Clear the lanes in exec for which the condition does not hold; jump if none is left (leave), or if some
        are."""
        assert self.condition is not None
        self.J.emit("s_and_b64", "exec", "exec", selection.mask(self.J, self.condition))
        self.J.jump("s_cbranch_execz" if leave else "s_cbranch_execnz", to)

    def leave(self, inside: Sequence[Branch | Loop], *, again: bool) -> None:
        """The active lanes leave the loop, or only this round (again). inside: the scopes with saved masks that they
        leave too, from the outermost to the innermost."""
        J, to = self.J, self.reconverge if again else self.exit
        if not inside:
            J.jump("s_branch", to)
            return
        self._save()
        if again:
            if self._continued is None:
                self._continued = J.temporary("s", types.U64)
                self._insert("s_mov_b64", self._continued, "0")
            J.emit("s_or_b64", self._continued, self._continued, "exec")
        for scope, outer in zip(inside, [self, *inside[:-1]], strict=True):
            scope.remove_lanes(outer.reconverge)
        J.emit("s_mov_b64", "exec", "0")
        J.jump("s_branch", inside[-1].reconverge)

    def remove_lanes(self, when_empty: Block) -> None:
        """The active lanes leave a loop around this one: clear them in the saved mask. when_empty: as in Branch."""
        self._save()
        assert self.saved_exec is not None
        self.J.emit("s_andn2_b64", self.saved_exec, self.saved_exec, "exec")
        self._when_empty = when_empty

    def close(self) -> None:
        """Emit the end of a round, and what follows the loop."""
        J = self.J
        J.region = self.inner
        J.start(self.reconverge)
        if self._continued is not None:
            J.emit("s_or_b64", "exec", "exec", self._continued)
            J.emit("s_mov_b64", self._continued, "0")
        if self.saved_exec is not None and (self.condition is None or self.condition.file == "s"):
            J.jump("s_cbranch_execz", self.exit)
        self.advance()
        if self.condition is None:
            J.jump("s_branch", self.head)
        elif self.condition.file == "v":
            self._test(self.head, leave=False)
        else:
            selection.branch(J, self.condition, self.head, when=True)
        J.start(self.exit)
        J.region = self.region
        if self.saved_exec is not None:
            J.emit("s_mov_b64", "exec", self.saved_exec)
        if self._when_empty is not None:
            J.region = Region(self.region)
            J.jump("s_cbranch_execz", self._when_empty)
