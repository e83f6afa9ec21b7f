"""Instruction selection: from expressions to the cheapest sequences of instructions.

``assign`` writes an expression into registers, ``evaluate`` computes one element, ``mask`` and ``branch`` use a
condition. Each rule computes its operands first and writes its target last, so that a target may be among them.
"""

from __future__ import annotations

from accelpatch.jit.selection.conditions import branch, mask
from accelpatch.jit.selection.evaluation import assign, evaluate, operand

__all__ = ["assign", "branch", "evaluate", "mask", "operand"]
