"""Wait states that the ISA asks for between two instructions, and that nothing in the hardware waits for by itself.

Each instruction is one wait state, s_nop N is N + 1. The rules, which instruction may follow which by how many, are
those of the ISA documents' tables of manually inserted wait states, by arch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelpatch.jit.emulate.assembly import Line
from accelpatch.jit.emulate.matrix_states import Matrix, between_matrices, matrix_of, other_after_matrix
from accelpatch.jit.emulate.operands import EXEC, M0, VCC, VGPR, name_of

TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
LANE_ACCESS = ("v_readlane_b32", "v_writelane_b32")
MEMORY = ("global_", "flat_", "buffer_", "scratch_")


@dataclass(frozen=True, eq=False)
class Traits:
    """What the rules need to know of an instruction; made once."""

    line: Line
    states: int  # that it is
    vector: bool
    memory: bool  # through a vector memory instruction
    lds: bool
    transcendental: bool
    partial: bool  # writes a part of a register
    dpp: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    lane_select: tuple[int, ...]
    stored: tuple[int, ...]  # registers of more than 64 bits that it stores
    matrix: Matrix | None


def traits_of(line: Line, reads: tuple[int, ...], writes: tuple[int, ...], arch: str, dpp: bool) -> Traits:
    name = line.mnemonic
    memory = name.startswith(MEMORY)
    partial = line.modifiers.get("dst_sel", "DWORD") != "DWORD" or name.startswith(("v_cvt_pk_fp8", "v_cvt_pk_bf8"))
    partial |= name.startswith("v_cvt_sr") or name.endswith("mixhi_f16") or _upper_half(line)
    lane_select = line.operands[2:3] if name in LANE_ACCESS else ()
    wide = line.operands[0 if name.startswith("buffer") else 1 :][:1] if memory and "store" in name else ()
    return Traits(
        line,
        int(line.operands[0].number) + 1 if name == "s_nop" else 1,
        name.startswith("v_"),
        memory,
        name.startswith("ds_"),
        name.startswith(TRANSCENDENTAL),
        partial,
        dpp,
        reads,
        writes,
        tuple(one.register for one in lane_select if one.kind == "register"),
        tuple(one.register + at for one in wide if one.count > 2 for at in range(one.count)),
        matrix_of(line, arch),
    )


def _upper_half(line: Line) -> bool:
    bits = line.modifiers.get("op_sel", "[]").strip("[]").split(",")
    return len(bits) == len(line.operands) and bits[-1].strip() == "1" and not line.mnemonic.startswith("v_pk_")


@dataclass(eq=False)
class WaitStates:
    """Of a wave. last: register -> who wrote it last, by a vector instruction, and when."""

    arch: str
    now: int = 0
    last: dict[int, tuple[int, Traits]] = field(default_factory=dict)
    stored: dict[int, tuple[int, Traits]] = field(default_factory=dict)
    matrices: list[tuple[int, Traits]] = field(default_factory=list)
    m0: int = -99

    def issue(self, t: Traits) -> None:
        """Check an instruction against those before it, and note it. Raises where wait states are missing."""
        if t.vector or t.memory or t.lds:
            self._check(t)
            if self.matrices:
                self._check_matrices(t)
        if t.vector:
            for register in t.writes:
                self.last[register] = (self.now, t)
        elif M0 in t.writes:
            self.m0 = self.now
        for register in t.stored:
            self.stored[register] = (self.now, t)
        if t.matrix:
            self.matrices = [one for one in self.matrices if self.now - one[0] < 24]
            self.matrices.append((self.now, t))
        self.now += t.states

    def _need(self, t: Traits, states: int, entry: tuple[int, Traits], why: str) -> None:
        found = self.now - entry[0] - entry[1].states
        if found < states:
            before = entry[1].line
            raise t.line.fault(
                f"{why} needs {states} wait states after {before.text!r} ({before.place}), and there are {found}: put "
                f"an s_nop {states - found - 1} between them"
            )

    def _check(self, t: Traits) -> None:
        later = self.arch != "gfx90a"
        for register in t.reads:
            entry = self.last.get(register)
            if entry is None or self.now - entry[0] > 8:
                continue
            for states, applies, why in self._rules(t, register, entry[1], later):
                if applies:
                    self._need(t, states, entry, why.format(name_of(register)))
        executed = self.last.get(EXEC)
        if executed and (t.dpp or t.matrix or (later and t.line.mnemonic in (*LANE_ACCESS, "v_readfirstlane_b32"))):
            self._need(t, 5 if t.dpp else 4, executed, "what depends on exec")
        if t.vector and not t.matrix:
            for register in t.writes:
                if entry := self.stored.get(register):
                    self._need(t, 2 if later else 1, entry, f"writing {name_of(register)}, which is being stored,")
        if "lds" in t.line.modifiers and t.memory and self.now - self.m0 - 1 < 1:
            raise t.line.fault("reading m0 needs 1 wait state after it was written: put an s_nop 0 between them")

    def _rules(self, t: Traits, register: int, before: Traits, later: bool) -> list[tuple[int, Any, str]]:
        """(wait states, whether they apply, what needs them) for a register that a vector instruction wrote."""
        if register < VGPR:
            lane = register in t.lane_select
            return [
                (5, t.memory, "reading {} by a memory instruction"),
                (4, lane, "selecting a lane by {}"),
                (4, t.line.mnemonic.startswith("v_div_fmas") and register in (VCC, VCC + 1), "reading vcc"),
                (2, later and t.vector and not lane and register < EXEC, "reading {}"),
            ]
        return [
            (2, t.dpp and not before.matrix, "reading {} by DPP"),
            (1, later and t.vector and before.transcendental and not t.transcendental, "reading {}"),
            (1, later and t.vector and before.partial, "reading {}, of which a part was written,"),
            (1, later and t.line.mnemonic in ("v_readlane_b32", "v_readfirstlane_b32"), "reading a lane of {}"),
            (2, t.matrix and not before.matrix, "reading {} by a matrix instruction"),
        ]

    def _check_matrices(self, t: Traits) -> None:
        for entry in reversed(self.matrices):
            before = entry[1]
            if self.now - entry[0] > 24 or before.matrix is None:
                continue
            states, why = (
                between_matrices(self.arch, before.matrix, t.matrix)
                if t.matrix
                else other_after_matrix(self.arch, before.matrix, t.vector, t.reads, t.writes if t.vector else ())
            )
            if states:
                self._need(t, states, entry, why)
