"""gemv_w8a8 without a device, in the forms of test_products_emulated.py: the integers of its operations, exactly."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch

from accelpatch.kernels.hip import binding
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support.gemv_checks import run
from tests.support.hip_gemv import Emulated, pack
from tests.support.interpreted import DEVICE
from tests.support.w8a8_checks import check_integers, check_large_sums, check_w8a8, reference, weight

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_w8a8_on_gpu.py is for a GPU"),
]
FORMS = ("nvidia", "alone", "gfx942")  # gfx90a's differs in the instruction alone
SOURCES = ("gemv/gemv_w8a8.hip", "gemv/gemv.hip")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulated]:
    @functools.cache
    def library(form: str) -> ctypes.CDLL:
        held = compiled(form, SOURCES, "w8a8", tmp_path_factory)
        held.set_emulator(4, 1, 0)
        return held

    def of(form: str) -> Emulated:
        held = library("nvidia" if form == "alone" else form)
        held.set_clusters(form == "nvidia")
        return Emulated(held)

    return of


@pytest.mark.each_value
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "form, dtype",
    [
        pytest.param(form, dtype, marks=pytest.mark.nightly if form != "nvidia" and dtype == torch.float16 else ())
        for form in FORMS
        for dtype in binding.DTYPES
    ],
    ids=str,
)
def test_its_integers_are_those_of_the_operations(
    form: str, dtype: torch.dtype, static: bool, made: Callable[[str], Emulated]
) -> None:
    torch.manual_seed(0)
    assert check_w8a8(made(form), dtype, static, "cpu") == []


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", binding.DTYPES, ids=str)
@pytest.mark.parametrize("form", ["nvidia", "gfx942"])
def test_every_value_becomes_the_integer_of_the_operation(
    form: str, dtype: torch.dtype, static: bool, made: Callable[[str], Emulated]
) -> None:
    assert check_integers(made(form), dtype, static, "cpu") == []


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_added_as_integers(form: str, made: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    assert check_large_sums(made(form), "cpu") == []


@pytest.mark.parametrize("tokens", [3, 8])
def test_what_warps_of_a_cluster_send_each_other_may_be_late(tokens: int, made: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    library = made("nvidia")
    packed, x = weight(1000, 512, False), torch.randn(tokens, 512, dtype=torch.bfloat16)
    want = reference(packed, x, {})
    try:
        for trial in range(4):
            library.held.set_delay((40, 400)[trial % 2], trial)
            assert torch.equal(run(library, packed, x, {}), want)
    finally:
        library.held.set_delay(0, 0)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("form", FORMS)
def test_more_rows_go_in_passes_of_eight(form: str, static: bool, made: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    packed, x = weight(40, 576, static), torch.randn(21, 576, dtype=torch.bfloat16)
    assert torch.equal(run(made(form), packed, x, {}), reference(packed, x, {}))


@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("form", FORMS)
def test_it_signals_its_columns_and_waits_for_all_of_its_input(
    form: str, m: int, made: Callable[[str], Emulated]
) -> None:
    """The flag is left as a product that waits for it leaves it."""
    torch.manual_seed(0)
    library, columns, overlaps = made(form), 4096 + 528, form != "gfx942"
    before, behind = weight(columns, 128, False), weight(20, columns, False)
    x = torch.randn(m, 128, dtype=torch.bfloat16)
    between = torch.full((m, columns), binding.SENTINEL, dtype=torch.int16).view(torch.bfloat16)
    flag, y = torch.zeros(2, dtype=torch.int32), torch.full((m, 20), float("nan"), dtype=torch.bfloat16)
    library.call(before, x, between, producer=flag.data_ptr(), producer_columns=4096)
    assert flag.tolist() == [4096 * overlaps, 0]
    library.call(behind, between, y, consumer=flag.data_ptr(), consumer_columns=4096)
    assert flag.tolist() == [0, 0]
    assert torch.equal(between, reference(before, x, {}))
    assert torch.equal(y, reference(behind, between, {}))


@pytest.mark.parametrize("m", [1, 3])
def test_another_product_consumes_what_it_signals(m: int, made: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    library, columns = made("nvidia"), 4096 + 528
    before, x = weight(columns, 128, False), torch.randn(m, 128, dtype=torch.bfloat16)
    behind = pack(torch.randn(20, columns) / columns**0.5, "plain", dtype=torch.bfloat16)
    between = torch.full((m, columns), binding.SENTINEL, dtype=torch.int16).view(torch.bfloat16)
    flag, y, want = torch.zeros(2, dtype=torch.int32), *torch.empty(2, m, 20, dtype=torch.bfloat16)
    library.call(before, x, between, producer=flag.data_ptr(), producer_columns=4096)
    library.call(behind, between, y, consumer=flag.data_ptr(), consumer_columns=4096)
    library.call(behind, reference(before, x, {}), want)
    assert flag.tolist() == [0, 0]
    assert torch.equal(y, want)


def test_nothing_is_copied_where_a_warp_has_no_tile(made: Callable[[str], Emulated]) -> None:
    """Zeros in place of weights would delay the end of a product."""
    torch.manual_seed(0)
    library = made("nvidia")
    packed, x = weight(80, 1024, False), torch.randn(1, 1024, dtype=torch.bfloat16)
    library.held.take_zeros()
    assert torch.equal(run(library, packed, x, {}), reference(packed, x, {}))
    assert library.held.take_zeros() == 0
