"""gemv_w8a8_fp8 without a device, in the forms of test_products_emulated.py, with 8-bit floats of both kinds.

An arch multiplies those of its own kind by its own instructions, and the other ones by portable code, which is all that
gfx90a has.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable

import pytest
import torch

from accelpatch.kernels.compiling.gpu_libraries import FP8
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.layout import WeightArguments
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support import w8a8_fp8_checks as checks
from tests.support.gemv_checks import run
from tests.support.hip_gemv import Emulated, pack
from tests.support.interpreted import DEVICE
from tests.support.w8a8_fp8_checks import reference, weight, wrong

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_w8a8_fp8_on_gpu.py is for a GPU"),
]
OWN = {"nvidia": "e4m3fn", "alone": "e4m3fn", "gfx942": "e4m3fnuz", "gfx950": "e4m3fn", "gfx90a": ""}
REPEATED = ("gfx950", "gfx90a")  # by others, but for a little
FORMS = [(form, kind) for form in OWN for kind in FP8 if OWN[form] == kind or form not in ("alone", "gfx950")]
SOURCES = ("gemv/gemv_w8a8_fp8.hip", "gemv/gemv.hip")
Made = Callable[[str], Emulated]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @functools.cache
    def library(form: str) -> ctypes.CDLL:
        held = compiled(form, SOURCES, "w8a8_fp8", tmp_path_factory)
        held.set_emulator(4, 1, 0)
        return held

    def of(form: str) -> Emulated:
        held = library("nvidia" if form == "alone" else form)
        held.set_clusters(form == "nvidia")
        return Emulated(held)

    return of


def repeats(form: str, kind: str) -> bool:
    """Whether others of FORMS show the same, but for portable code that is slow to emulate."""
    return form in REPEATED or OWN[form] != kind


def forms(*, portable: bool = False) -> pytest.MarkDecorator:
    """FORMS; what repeats others is nightly, but with `portable` not portable code."""
    nightly = [form in REPEATED if portable else repeats(form, kind) for form, kind in FORMS]
    marks = [pytest.mark.nightly if one else () for one in nightly]
    return pytest.mark.parametrize(
        "form, kind", [pytest.param(*one, marks=mark) for one, mark in zip(FORMS, marks, strict=True)]
    )


@pytest.mark.each_value
@pytest.mark.parametrize(
    "form, kind, dtype, static",
    [
        pytest.param(form, kind, dtype, static, marks=pytest.mark.nightly if again else ())
        for form, kind in FORMS
        for dtype in binding.DTYPES
        for static in (False, True)
        if not repeats(form, kind) or (dtype == torch.bfloat16 and not static)
        for again in [static or repeats(form, kind) or (form != "nvidia" and dtype == torch.float16)]
    ],
    ids=str,
)
def test_the_numbers_of_the_formula(form: str, kind: str, dtype: torch.dtype, static: bool, made: Made) -> None:
    torch.manual_seed(0)
    assert checks.check_w8a8_fp8(made(form), kind, dtype, static, "cpu") == []


@forms(portable=True)
def test_every_code_and_every_float(form: str, kind: str, made: Made) -> None:
    assert checks.check_every_code(made(form), kind, "cpu") == []
    assert checks.check_every_float(made(form), kind, "cpu") == []


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", binding.DTYPES, ids=str)
@forms()
def test_every_value_becomes_the_float_of_the_formula(form: str, kind: str, dtype: torch.dtype, made: Made) -> None:
    assert checks.check_scaled(made(form), kind, dtype, "cpu") == []


@forms()
def test_sums_are_float32(form: str, kind: str, made: Made) -> None:
    torch.manual_seed(0)
    assert checks.check_large_sums(made(form), kind, "cpu") == []


@pytest.mark.parametrize("by_variant", [True, False], ids=["form-of-variant", "form-given"])
@forms(portable=True)
def test_a_launch_by_the_binding(
    form: str, kind: str, by_variant: bool, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a norm, a gate, a bias and a residual, of x[2, 3, K]."""
    torch.manual_seed(0)
    library, function, n, k = made(form), "gemv_w8a8_fp8", 96, 320
    monkeypatch.setattr(binding, "_entry", lambda *_: binding.declared(library.held, f"accelpatch_{function}"))
    monkeypatch.setattr(binding, "on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(binding, "stream_of", lambda _: None)
    packed, x = weight(kind, n, k, False), torch.randn(2, 3, k, dtype=torch.bfloat16)
    bias, gain = torch.randn(n, dtype=x.dtype), 1 + 0.1 * torch.randn(k, dtype=x.dtype)
    residual = torch.randn(2, 3, n // 2, dtype=x.dtype)
    number = None if by_variant else FP8[kind]
    args = WeightArguments(function, n, k, packed.w, number, packed.scale, None, variant=kind)
    before = {"norm": "rms", "norm_weight": gain, "activation": "silu_gate", "bias": bias}
    y = binding.launch(args, x, residual=residual, **before)
    assert y.shape == residual.shape
    due = reference(packed, x.flatten(0, 1), {**before, "residual": residual.flatten(0, 1)})
    assert wrong(y.flatten(0, 1), due) == ""


@pytest.mark.parametrize("tokens", [3, 8])
def test_what_warps_of_a_cluster_send_each_other_may_be_late(tokens: int, made: Made) -> None:
    torch.manual_seed(0)
    library = made("nvidia")
    packed, x = weight("e4m3fn", 1000, 512, False), torch.randn(tokens, 512, dtype=torch.bfloat16)
    want = run(library, packed, x, {})
    assert wrong(want, reference(packed, x, {})) == ""
    try:
        for trial in range(4):
            library.held.set_delay((40, 400)[trial % 2], trial)
            assert torch.equal(run(library, packed, x, {}), want)
    finally:
        library.held.set_delay(0, 0)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@forms(portable=True)
def test_more_rows_go_in_passes_of_eight(form: str, kind: str, static: bool, made: Made) -> None:
    torch.manual_seed(0)
    packed, x = weight(kind, 40, 576, static), torch.randn(21, 576, dtype=torch.bfloat16)
    y = run(made(form), packed, x, {})
    assert wrong(y, reference(packed, x, {})) == ""
    assert torch.equal(y[8:16], run(made(form), packed, x[8:16], {}))


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("form", ["nvidia", "gfx942"])
def test_it_signals_its_columns_and_waits_for_all_of_its_input(form: str, m: int, made: Made) -> None:
    """The flag is left as a product that waits for it leaves it."""
    torch.manual_seed(0)
    library, columns, overlaps, kind = made(form), 4096 + 528, form != "gfx942", OWN[form]
    before, behind = weight(kind, columns, 128, False), weight(kind, 20, columns, False)
    x = torch.randn(m, 128, dtype=torch.bfloat16)
    between = torch.full((m, columns), binding.SENTINEL, dtype=torch.int16).view(torch.bfloat16)
    flag, y = torch.zeros(2, dtype=torch.int32), torch.full((m, 20), float("nan"), dtype=torch.bfloat16)
    library.call(before, x, between, producer=flag.data_ptr(), producer_columns=4096)
    assert flag.tolist() == [4096 * overlaps, 0]
    library.call(behind, between, y, consumer=flag.data_ptr(), consumer_columns=4096)
    assert flag.tolist() == [0, 0]
    assert torch.equal(between, run(library, before, x, {}))
    assert wrong(y, reference(behind, between, {})) == ""


@pytest.mark.parametrize("m", [1, 3])
def test_another_product_consumes_what_it_signals(m: int, made: Made) -> None:
    torch.manual_seed(0)
    library, columns = made("nvidia"), 4096 + 528
    before, x = weight("e4m3fn", columns, 128, False), torch.randn(m, 128, dtype=torch.bfloat16)
    behind = pack(torch.randn(20, columns) / columns**0.5, "plain", dtype=torch.bfloat16)
    between = torch.full((m, columns), binding.SENTINEL, dtype=torch.int16).view(torch.bfloat16)
    flag, y, want = torch.zeros(2, dtype=torch.int32), *torch.empty(2, m, 20, dtype=torch.bfloat16)
    library.call(before, x, between, producer=flag.data_ptr(), producer_columns=4096)
    library.call(behind, between, y, consumer=flag.data_ptr(), consumer_columns=4096)
    library.call(behind, run(library, before, x, {}).contiguous(), want)
    assert flag.tolist() == [0, 0]
    assert torch.equal(y, want)


def test_nothing_is_copied_where_a_warp_has_no_tile(made: Made) -> None:
    """Zeros in place of weights would delay the end of a product."""
    torch.manual_seed(0)
    library = made("nvidia")
    packed, x = weight("e4m3fn", 80, 1024, False), torch.randn(1, 1024, dtype=torch.bfloat16)
    library.held.take_zeros()
    assert wrong(run(library, packed, x, {}), reference(packed, x, {})) == ""
    assert library.held.take_zeros() == 0
