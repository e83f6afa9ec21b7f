"""The experts of one layer of a native decode step: their packs, and the router that chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import EXPERT_ACTIVATIONS, MAX_CHOSEN, MAX_EXPERTS, ROWS
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.expert_pack import ExpertPack


@dataclass(frozen=True, eq=False)
class StepExperts:
    """router: a DENSE Pack [E, hidden]. gate_up: packs [2 I, hidden], the rows of gate before those of up. down: packs
    [hidden, I]. chosen: experts of a token. normalise: whether their weights add up to one. alpha, limit: of
    clamped_swiglu."""

    router: Pack
    gate_up: ExpertPack
    down: ExpertPack
    chosen: int
    normalise: bool
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of gate, up and down of one expert."""
        half = (self.gate_up.n // 2, self.gate_up.k)
        return {"gate": half, "up": half, "down": (self.down.n, self.down.k)}

    def bytes_of(self, tokens: int) -> int:
        """Bytes that a step of so many tokens reads, where each chooses others while there are any."""
        number = len(self.gate_up.data)
        chosen = min(number, tokens * self.chosen)
        return self.router.nbytes + (self.gate_up.nbytes + self.down.nbytes) * chosen // number

    def why_not(self, hidden: int, activation: str) -> str | None:
        """Why they are no part of a step, whatever the other weights are; None where they are."""
        number = len(self.gate_up.data)
        if (self.router.n, self.router.k) != (number, hidden) or len(self.down.data) != number:
            return f"its router is {self.router.n} x {self.router.k}, and there are {number} experts"
        if activation not in EXPERT_ACTIVATIONS:
            return f"the native step has no activation {activation}"
        return why_not(number, self.down.k, self.chosen)

    def fill(self, layer: native_library.Layer) -> None:
        """Write them into the C structure, which points into these packs."""
        gate, up = self.gate_up.of(0).struct(), self.gate_up.of(0).struct()
        stride, biases = self.gate_up.data.stride(0), self.gate_up.bias
        gate.n = up.n = self.gate_up.n // 2
        up.data = self.gate_up.data.data_ptr() + stride // 2
        up.bias = None if biases is None else biases.data_ptr() + gate.n * biases.element_size()
        layer.gate, layer.up, layer.down = gate, up, self.down.of(0).struct()
        layer.router, layer.chosen, layer.normalise = self.router.struct(), self.chosen, int(self.normalise)
        layer.expert_bytes, layer.down_bytes = stride, self.down.data.stride(0)
        layer.alpha, layer.limit = self.alpha, self.limit


def why_not(number: int, inner: int, chosen: int) -> str | None:
    """Why experts of this size are no part of a step; None where they are."""
    if number > MAX_EXPERTS or not 1 <= chosen <= min(MAX_CHOSEN, number):
        return f"{chosen} of {number} experts are beyond {MAX_CHOSEN} of {MAX_EXPERTS}"
    if inner % ROWS:
        return f"gate and up of an expert have {inner} rows, which are not whole blocks of {ROWS}"
    return None
