"""The instruction table: what of each unit it says; the gate holds all of it to the assemblers."""

from __future__ import annotations

import pytest

from accelpatch.jit import table


@pytest.mark.parametrize("line", [
    "v_fmac_f32 valu a45 short > +v1 vsil1 vsi1", "s_addc_u32 salu a45 - scc>scc =s1 sil1 sil1",
    "global_load_dwordx4 global a45 load > =va4 v1/2 so2", "v_mfma_f32_16x16x16_bf16 matrix 45 - > =va4 va2 va2 vai4",
    "v_cvt_pk_bf16_f32 valu 5 - > =v1 vsi1 vsi1", "s_and_saveexec_b64 salu a45 - exec>exec,scc =s2 sil2",
    "v_addc_co_u32 valu a45 short > =v1 =s2 vsil1 vsi1 s2", "ds_write2_b32 ds a45 store > v1 va1 va1",
    "v_div_fmas_f32 valu a45 - vcc> =v1 vsi1 vsi1 vsi1", "global_load_short_d16_hi global a45 load > +va1 v1/2 so2",
    "v_mfma_f32_16x16x8_xf32 matrix 4 - > =va4 va2 va2 vai4", "s_cbranch_scc0 control a45 - scc> b0",
    "s_cmov_b32 salu a45 - scc> +s1 sil1", "v_writelane_b32 valu a45 - > +v1 si1 si1",
    "buffer_load_dword buffer a45 lds,store m0> vo1/2 s4 si1", "v_rcp_f32 trans a45 short > =v1 vsil1",
    "v_swap_b32 valu a45 short > +v1 +v1", "s_cselect_b32 salu a45 - scc> =s1 sil1 sil1",
], ids=lambda line: line.split()[0])  # fmt: skip
def test_a_line(line: str) -> None:
    assert line in table.lines()[line.split()[0]]


def test_lines_are_what_is_parsed() -> None:
    for several in table.lines().values():
        for line in several:
            assert table.parse(line).line() == line


def test_there_are_as_many_as_there_were() -> None:
    forms = [form for name in table.lines() for form in table.lookup(name)]
    assert len(forms) > 1300
    assert all(sum(arch in form.archs for form in forms) > 1000 for arch in table.ARCHS.values())
    assert table.lookup("v_no_such") == ()
