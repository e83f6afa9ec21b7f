"""Wait states: an error without the s_nop that the ISA asks for, none with it; and clang's are all needed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from accelpatch.jit.emulate import EmulationError, run
from tests.support.amdgcn import compiled, kernel, needs_clang

START = (
    "v_mov_b32 v1, 1.0\n v_mov_b32 v2, 1.0\n v_mov_b32 v3, 0\n v_mov_b32 v4, 0\n v_mov_b32 v5, 0\n s_mov_b32 s6, 0\n"
)
#: arch, first, second, wait states
NEEDED = {
    "lane-select": ("gfx90a", "v_readfirstlane_b32 s4, v3", "v_readlane_b32 s5, v1, s4", 4),
    "div-fmas": ("gfx90a", "v_cmp_eq_u32 vcc, v3, v4", "v_div_fmas_f32 v9, v1, v2, v1", 4),
    "dpp": ("gfx90a", "v_add_u32 v9, v3, v4", "v_mov_b32_dpp v10, v9 row_mirror row_mask:0xf bank_mask:0xf", 2),
    "dpp-exec": ("gfx90a", "v_cmpx_eq_u32 vcc, v3, v4", "v_mov_b32_dpp v10, v3 row_shr:1", 5),
    "no-carry-on-gfx90a": ("gfx90a", "v_add_co_u32 v9, vcc, v3, v4", "v_addc_co_u32 v10, vcc, v3, v4, vcc", 0),
    "carry": ("gfx942", "v_add_co_u32 v9, vcc, v3, v4", "v_addc_co_u32 v10, vcc, v3, v4, vcc", 2),
    "mask": ("gfx942", "v_cmp_eq_u32 s[4:5], v3, v4", "v_cndmask_b32 v9, v1, v2, s[4:5]", 2),
    "transcendental": ("gfx942", "v_exp_f32 v9, v1", "v_add_f32 v10, v9, v1", 1),
    "no-transcendental-after-another": ("gfx942", "v_exp_f32 v9, v1", "v_log_f32 v10, v9", 0),
    "part": ("gfx942", "v_cvt_pk_fp8_f32 v3, v1, v2", "v_add_u32 v10, v3, v1", 1),
    "first-lane": ("gfx942", "v_add_u32 v9, v3, v4", "v_readfirstlane_b32 s4, v9", 1),
    "stored": ("gfx942", "ds_nop\n global_store_dwordx4 v3, v[1:4], s[8:9]", "v_mov_b32 v2, 0", 2),
    "stored-gfx90a": ("gfx90a", "ds_nop\n global_store_dwordx4 v3, v[1:4], s[8:9]", "v_mov_b32 v2, 0", 1),
    "before-matrix": ("gfx942", "v_mov_b32 v1, 2.0", "v_mfma_f32_32x32x2_f32 a[0:15], v1, v2, 0", 2),
    "after-matrix": ("gfx942", "v_mfma_f32_16x16x4_f32 v[12:15], v1, v2, 0", "v_mov_b32 v9, v12", 10),
    "after-fast-matrix": ("gfx942", "v_mfma_f32_16x16x16_f16 v[12:15], v[2:3], v[4:5], 0", "v_mov_b32 v9, v12", 7),
    "after-wide-matrix": ("gfx90a", "v_mfma_f32_32x32x2f32 v[12:27], v1, v2, 0", "v_mov_b32 v9, v12", 19),
    "matrix-as-a": ("gfx90a", "v_mfma_f32_4x4x1f32 v[12:15], v1, v2, 0", "v_mfma_f32_4x4x1f32 v[16:19], v12, v2, 0", 5),
    "matrix-as-c": ("gfx90a", "v_mfma_f32_16x16x4f32 v[12:15], v1, v2, 0",
                    "v_mfma_f32_16x16x4f32 v[12:15], v1, v2, v[12:15]", 0),
    "overwrites-c": ("gfx90a", "v_mfma_f32_4x4x1f32 v[12:15], v1, v2, v[2:5]", "v_mov_b32 v3, 0", 1),
    "double": ("gfx942", "v_mfma_f64_16x16x4_f64 v[12:19], v[2:3], v[4:5], 0", "v_mov_b32 v9, v12", 11),
}  # fmt: skip


def launch(arch: str, first: str, between: str, second: str) -> None:
    out = np.zeros(4096, np.int32)
    load = "s_load_dwordx2 s[8:9], s[0:1], 0\n s_waitcnt lgkmcnt(0)\n v_mov_b32 v27, 0\n"
    code = f"{load}{START}s_nop 4\n{first}\n{between}\n{second}\n s_waitcnt vmcnt(0) lgkmcnt(0)"
    run(kernel(code, "8", arch), "k", [1], [64], [("global_buffer", out)], arch=arch, strict=False)


@pytest.mark.parametrize("name", NEEDED)
def test_as_many_as_the_isa_asks_for(name: str) -> None:
    arch, first, second, states = NEEDED[name]
    if states:
        launch(arch, first, "\n".join([f"s_nop {min(states, 16) - 1}", *["s_nop 0"] * (states - 16)]), second)
        for fewer in (0, states - 1):
            with pytest.raises(EmulationError, match=rf"needs {states} wait states .* there are {fewer}: put"):
                launch(arch, first, "\n".join(["s_nop 0"] * fewer), second)
    else:
        launch(arch, first, "", second)


def test_a_scalar_address_of_a_vector_instruction() -> None:
    code = "v_readfirstlane_b32 s4, v0\n v_readfirstlane_b32 s5, v0\n {}\n global_load_dword v9, v0, s[4:5]"
    with pytest.raises(EmulationError, match="needs 5 wait states after 'v_readfirstlane_b32 s5"):
        run(kernel(code.format("s_nop 3")), "k", [1], [64], [], arch="gfx942")
    with pytest.raises(EmulationError, match=r"is misaligned|is out of bounds"):
        run(kernel(code.format("s_nop 4")), "k", [1], [64], [], arch="gfx942")


@needs_clang
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_each_of_clangs_is_needed(arch: str) -> None:
    """Clang's assembly passes as it is, and each of its s_nop, one state shorter, is an error."""
    text = compiled(arch, "tests/jit/emulate/hip/matrix.hip")
    a = torch.ones(32, 24, dtype=torch.float64)
    found = 0
    for name in ("bf16_32", "f16_16", "f32_16", "f64_16"):
        begin = text.index(f"\n{name}:")
        for nop in re.finditer(r"\ts_nop (\d+)", text[begin : text.index("s_endpgm", begin)]):
            start, states = begin + nop.start(), int(nop[1])
            shorter = f"\ts_nop {states - 1}" if states else ""
            changed = text[:start] + shorter + text[begin + nop.end() :]
            arguments = [*(("global_buffer", one) for one in (a, a, a.clone())), ("int", 1)]
            with pytest.raises(EmulationError, match="wait states"):
                run(changed, name, [1], [64], arguments, arch=arch, strict=False)
            found += 1
    assert found >= 4
