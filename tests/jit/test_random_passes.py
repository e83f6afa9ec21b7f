"""Random kernels leave the same memory before and after each pass, which is what plain Python computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from accelpatch.jit import compiling
from accelpatch.jit.emulate import EmulationError, run
from accelpatch.jit.kernel import OPTIONAL
from accelpatch.jit.passes import pipeline
from tests.support.jit_memory_programs import PROGRAMS, ROWS, SLOTS, expected, kernel
from tests.support.jit_programs import LANES, VECTORS

#: where the kernel has waits of its own there is nothing for these to do
OF_AUTO = ("dead_stores", "auto_waits")
CASES = [("gfx942", "auto"), ("gfx950", "checked")]


def start() -> np.ndarray:
    return np.random.default_rng(0).integers(-20, 80, (VECTORS, LANES), dtype=np.int32)


def memory(assembly: str, arch: str, *, wait_states: bool = True) -> list[list[int]]:
    """What a kernel leaves in out."""
    slots, out = np.zeros((SLOTS, LANES), np.int32), np.full((ROWS, LANES), -1, np.int32)
    buffers = [("global_buffer", one) for one in (start(), slots, out)]
    run(assembly, "_kernel", [1], [LANES], buffers, arch=arch, wait_states=wait_states)
    return out.tolist()


class Comparison:
    """Compiles programs with no pass, with single ones, and with all; and compares what each leaves in memory.

    few: of the single passes each program has two, the next one the next two. changed: passes -> the programs of which
    they made something else than all passes before them in this list. Wait states change nothing that the emulator
    computes, so that a kernel without required_noops is compared too.
    """

    def __init__(self, arch: str, waits: str, *, few: bool):
        self.arch, self.waits, self.few, self.number = arch, waits, few, 0
        self.kernel = kernel(waits)
        self.single = [name for name in OPTIONAL if waits == "auto" or name not in OF_AUTO]
        self.changed: Counter[str] = Counter()

    def check(self, program: Any) -> None:
        single = [self.single[(2 * self.number + at) % len(self.single)] for at in range(2)]
        self.number += 1
        wanted, ran = expected(program, start().tolist()), set[str]()
        for passes in ([], *([name] for name in (single if self.few else self.single)), OPTIONAL):
            assembly = self.assembly(program, set(OPTIONAL) - set(passes))
            if assembly not in ran:
                ran.add(assembly)
                assert memory(assembly, self.arch) == wanted, passes
                self.changed[" ".join(passes)] += 1
        bare = self.assembly(program, {"required_noops"})
        assert bare in ran or memory(bare, self.arch, wait_states=False) == wanted

    def assembly(self, program: Any, without: set[str]) -> str:
        constants = {"program": program, "waits": self.waits}
        return compiling.compiled(
            self.kernel.function, self.arch, 64, self.kernel.signature.arguments, constants, waits=self.waits,
            without=without,
        ).assembly  # fmt: skip


def compared(arch: str, waits: str, programs: int, *, few: bool) -> Comparison:
    comparison = Comparison(arch, waits, few=few)

    # Not made smaller: that would take minutes.
    @settings(max_examples=programs, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
              phases=[Phase.generate])  # fmt: skip
    @given(program=PROGRAMS)
    def each(program: Any) -> None:
        comparison.check(program)

    each()
    return comparison


@pytest.mark.parametrize("arch, waits", CASES)
def test_each_pass_keeps_what_a_kernel_leaves_in_memory(arch: str, waits: str) -> None:
    done = compared(arch, waits, 50, few=True)
    assert done.number >= 50
    assert set(done.changed) == {"", *done.single, " ".join(OPTIONAL)}  # each pass changed some program


@pytest.mark.nightly
@pytest.mark.parametrize("arch, waits", CASES)
def test_a_thousand_of_them(arch: str, waits: str) -> None:
    done = compared(arch, waits, 500, few=False)
    print(f"{arch}, waits {waits}: {done.number} programs, {done.changed.total()} kernels, 0 differences")
    assert done.number >= 500


def test_a_pass_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_store(program: Any) -> None:
        for block in program.blocks:
            block.instructions = [one for one in block.instructions if one.name != "ds_write_b32"]

    monkeypatch.setattr(pipeline, "IMPROVING", {**pipeline.IMPROVING, "hide_stalls": forgets_a_store})
    with pytest.raises((AssertionError, EmulationError)):
        Comparison("gfx942", "auto", few=False).check((("write", 0, 5),))
