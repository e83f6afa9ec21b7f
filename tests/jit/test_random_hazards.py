"""Random sequences of instructions have the wait states that the emulator, which has rules of its own, asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelpatch.jit import compiling, jit
from accelpatch.jit.emulate import EmulationError, run

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
DPP = "row_shr:1 row_mask:0xf bank_mask:0xf"
#: name -> what it emits with J, vector registers v (16), accumulators a (8), scalars s (4 pairs), and numbers i and j
STEPS: dict[str, Callable[[Any, Any, Any, Any, int, int], Any]] = {
    "move": lambda J, v, a, s, i, j: J.v_mov_b32(v[i], v[j]),
    "add": lambda J, v, a, s, i, j: J.v_add_f32(v[i], v[j], v[i]),
    "reciprocal": lambda J, v, a, s, i, j: J.v_rcp_f32(v[i], v[j]),
    "dpp": lambda J, v, a, s, i, j: J.v_add_f32(v[i], v[j], v[i], mod=DPP),
    "compare": lambda J, v, a, s, i, j: J.v_cmp_lt_f32(s[i % 4], v[i], v[j]),
    "select": lambda J, v, a, s, i, j: J.v_cndmask_b32(v[i], v[j], v[i], s[j % 4]),
    "first lane": lambda J, v, a, s, i, j: J.v_readfirstlane_b32(s[i % 4].view("u32")[0], v[j]),
    "lane": lambda J, v, a, s, i, j: J.v_readlane_b32("m0", v[i], s[j % 4].view("u32")[0]),
    "half": lambda J, v, a, s, i, j: J.v_fma_mixhi_f16(v[i], v[j], v[i], v[j]),
    "store": lambda J, v, a, s, i, j: J.ds_write_b32(J.address, v[j]),
    "store four": lambda J, v, a, s, i, j: J.global_store_dwordx4(J.address, v[4 * (i % 4) : 4 * (i % 4) + 4], J.out),
    "scalar address": lambda J, v, a, s, i, j: J.buffer_store_dword(
        v[j], J.address, J.descriptor, s[i % 4].view("u32")[1], mod="offen"
    ),
    "16x16": lambda J, v, a, s, i, j: J.v_mfma_f32_16x16x16bf16_1k(_four(v, i), _two(v, j), _two(v, i), _four(v, i)),
    "16x16, other sum": lambda J, v, a, s, i, j: J.v_mfma_f32_16x16x16bf16_1k(_four(v, i), _two(v, j), _two(v, i),
                                                                              _four(v, j)),
    "16x16, accumulators": lambda J, v, a, s, i, j: J.v_mfma_f32_16x16x16bf16_1k(_four(a, i), _two(v, j), _two(v, i),
                                                                                 _four(a, i)),
    "of f32": lambda J, v, a, s, i, j: J.v_mfma_f32_16x16x4f32(_four(v, i), v[j], v[i], _four(v, i)),
    "4x4": lambda J, v, a, s, i, j: J.v_mfma_f32_4x4x4f16(_four(v, i), _two(v, j), _two(v, i), _four(v, j)),
    "from accumulator": lambda J, v, a, s, i, j: J.v_accvgpr_read_b32(v[i], a[j % 8]),
    "to accumulator": lambda J, v, a, s, i, j: J.v_accvgpr_write_b32(a[i % 8], v[j]),
    "scalar": lambda J, v, a, s, i, j: J.s_mov_b64(s[i % 4], s[j % 4]),
}  # fmt: skip
SEQUENCES = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 15), st.integers(0, 15)), min_size=2, max_size=24
)


def _four(x: Any, at: int) -> Any:
    first = 4 * (at % (x.count // 4))
    return x[first : first + 4]


def _two(x: Any, at: int) -> Any:
    first = 2 * (at % (x.count // 2))
    return x.view("u32")[first : first + 2]


@jit()
def kernel(J, steps, rounds, out: "float*"):
    J.out, J.address = out, J.gpr(J.threadIdx.x * 16)
    v, a = J.gpr(16, "vf32", 0.0), J.gpr(8, "af32", 0.0)
    s = [J.gpr("su64", 0) for _ in range(4)]
    J.descriptor = J.buffer(out, 1024)
    J.alloc_lds(1024)
    with J.For(0, rounds):
        for name, i, j in steps:
            STEPS[name](J, v, a, s, i, j)
    J.s_waitcnt(mod="vmcnt(0) lgkmcnt(0)")
    base = J.gpr("su64", out)
    for one in (v, a):
        for at in range(0, one.count, 4):
            base[0] = base + 1024
            J.global_store_dwordx4(J.address, one[at : at + 4], base)


#: every instruction stays, in its order
AS_WRITTEN = ("dead_code", "common_subexpressions", "hide_stalls")


def emulate(steps: Any, arch: str, *without: str) -> bytes:
    out = np.zeros(7 * 256, np.float32)
    made = compiling.compiled(
        kernel.function, arch, 64, kernel.signature.arguments, {"steps": tuple(steps), "rounds": 2},
        without=without,
    )  # fmt: skip
    run(made.assembly, "kernel", [1], [64], [("global_buffer", out)], arch=arch, misaligned=True)
    return out.tobytes()


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
@QUICK
@given(steps=SEQUENCES)
def test_no_wait_state_is_missing_in_any_order(arch: str, steps: Any) -> None:
    assert emulate(steps, arch) == emulate(steps, arch, *AS_WRITTEN)


def test_the_emulator_sees_what_is_missing() -> None:
    with pytest.raises(EmulationError, match="wait states"):
        emulate([("16x16", 0, 1), ("move", 5, 0)], "gfx942", *AS_WRITTEN, "required_noops")
