"""Which calls of the device library's functions are refused, and the names of their libraries."""

from __future__ import annotations

import pytest
import torch

from accelpatch.device import ARCHS, KNOWN, probe
from accelpatch.kernels.compiling.gpu_libraries import FP8, GPU_LIBRARIES
from accelpatch.kernels.compiling.targets import unknown_arch
from accelpatch.kernels.hip import binding
from accelpatch.kernels.spec import Spec

FUNCTION = "gemv_w8a8_fp8"


def spec(n: int = 4096, k: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Spec:
    return Spec("linear", {"M": 1, "N": n, "K": k}, dtype)


@pytest.fixture(autouse=True)
def _no_prebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELPATCH_KERNELS", raising=False)


@pytest.mark.parametrize("form", FP8)
@pytest.mark.parametrize("arch", [arch for arch, device in KNOWN.items() if unknown_arch(device) is None])
def test_an_arch_multiplies_8_bit_floats_of_its_own_form_alone(arch: str, form: str) -> None:
    own = ARCHS[arch].fp8
    reason = binding.why_not(spec(), KNOWN[arch], FUNCTION, form)
    if form == own:
        assert reason is None
    elif own is None:
        assert reason == f"its matrix unit has no 8-bit floats ({arch})"
    else:
        assert reason == f"its 8-bit floats are {own}, not {form} ({arch})"
    assert binding.why_not(spec(), KNOWN[arch], "gemv_fp8", form) is None, "as weights alone any form goes anywhere"


def test_who_has_which_form() -> None:
    assert [arch for arch, facts in ARCHS.items() if facts.why_not_fp8("e4m3fnuz") is None] == ["gfx942"]
    assert {"gfx950", "sm_89", "sm_90"} < {arch for arch, facts in ARCHS.items() if facts.why_not_fp8("e4m3fn") is None}
    assert {"gfx90a", "sm_80"} < {arch for arch, facts in ARCHS.items() if facts.fp8 is None}


def test_what_else_is_refused() -> None:
    sm_90 = KNOWN["sm_90"]
    assert "runs on a GPU" in str(binding.why_not(spec(), probe("cpu"), FUNCTION, "e4m3fn"))
    assert "not torch.float32" in str(binding.why_not(spec(dtype=torch.float32), sm_90, FUNCTION, "e4m3fn"))
    assert "2^31 or more" in str(binding.why_not(spec(n=1 << 31), sm_90, FUNCTION, "e4m3fn"))


def test_the_libraries_of_8_bit_floats() -> None:
    names = [binding.library_name(FUNCTION, dtype, form) for dtype in binding.DTYPES for form in FP8]
    assert names[0] == "gemv_w8a8_fp8_bf16_e4m3fn"
    assert GPU_LIBRARIES[names[3]] == {"gemv/gemv_w8a8_fp8.hip": ("-DONLY_DTYPE=1", "-DONLY_FORM=1")}
    assert set(names) < set(GPU_LIBRARIES)
