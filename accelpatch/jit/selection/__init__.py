"""Instruction selection: from expressions to the cheapest sequences of instructions.

``assign`` writes an expression into registers, ``evaluate`` computes one element, ``mask`` and ``branch`` use a
condition. Each rule reads its operands before it writes its target, so that the target may be one of them.
"""

from __future__ import annotations

from accelpatch.jit.selection.conditions import branch, mask
from accelpatch.jit.selection.evaluation import assign, evaluate, operand

__all__ = ["assign", "branch", "evaluate", "mask", "operand"]
