"""Random kernels give in the emulator what plain Python computes, with dead code and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from accelpatch.jit import compiling
from accelpatch.jit.emulate import run
from tests.support import jit_programs
from tests.support.jit_programs import LANES, SCALARS, VECTORS

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PROGRAMS = jit_programs.bodies(2)


def start(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-20, 80, (VECTORS, LANES), dtype=np.int32)


def memory(program: Any, arch: str) -> list[list[int]]:
    """What the kernel leaves, from a compilation of its own."""
    made = compiling.compiled(
        jit_programs.kernel.function, arch, 64, jit_programs.kernel.signature.arguments, {"program": program}
    )
    out = np.full((VECTORS + SCALARS, LANES), -1, np.int32)
    run(made.assembly, "kernel", [1], [LANES], [("global_buffer", start()), ("global_buffer", out)], arch=arch)
    return out.tolist()


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@QUICK
@given(program=PROGRAMS)
def test_it_is_what_python_computes(arch: str, program: Any) -> None:
    assert memory(program, arch) == jit_programs.expected(program, start().tolist())
