"""The device library's products without a device: NVIDIA's and AMD's forms compiled for the CPU by the SIMT emulator.

As test_attention_emulated.py. NVIDIA's have clusters of blocks ("nvidia") or none ("alone", as before Hopper).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accelpatch.kernels.hip import binding
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support.gemv_checks import check_signals, check_small, run
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import FORMATS, Emulated, pack
from tests.support.interpreted import DEVICE
from tests.support.rows_checks import ROWS_FORMATS, check_rows

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_ops_on_gpu.py is for a GPU"),
]
FLOATS = ("gemv/gemv.hip", "gemv/gemv_fp8.hip", "gemv/gemv_compact.hip")
INTEGERS = (
    "gemv/gemv_int8.hip",
    "gemv/gemv_int4.hip",
    "gemv/gemv_int4_32.hip",
    "gemv/gemv_int4_64.hip",
    "gemv/gemv_int3.hip",
    "gemm/int4_gemm.hip",
)
# gfx90a's fp16 does not go through the matrix unit; else it is as gfx942
FORMS = ("nvidia", "alone", "gfx942", "gfx90a")
CASES = [(name, torch.bfloat16) for name in FORMATS]
CASES += [(name, torch.float16) for name in ("plain", "fp8", "int8", "int4_g128_minimum", "nvfp4_g16")]
# their group sizes and offsets are those of others too; NVIDIA's form runs them all
SHOWN_BY_OTHERS = ("int8_g32", "int8_g128", "int4_g128", "int4_g64", "int4_g32_minimum", "int4_row_zero",
                   "nf4_g64", "fp4_g64")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulated]:
    @functools.cache
    def library(form: str) -> ctypes.CDLL:
        held = compiled(form, FLOATS if form == "gfx90a" else (*FLOATS, *INTEGERS), "products", tmp_path_factory)
        held.set_emulator(4, 1, 0)
        return held

    def of(form: str) -> Emulated:
        held = library("nvidia" if form == "alone" else form)
        held.set_clusters(form == "nvidia")
        return Emulated(held)

    return of


def case(form: str, *rest: Any, repeats: bool) -> Any:
    """A case of a form; one that repeats others is nightly."""
    return pytest.param(form, *rest, marks=pytest.mark.nightly if repeats else ())


@pytest.mark.each_value
@pytest.mark.parametrize(
    "form, name, dtype",
    [case(form, *one, repeats=form == "gfx942" and one[0] in SHOWN_BY_OTHERS) for form in FORMS for one in CASES],
    ids=str,
)
def test_small_shapes(form: str, name: str, dtype: torch.dtype, made: Callable[[str], Emulated]) -> None:
    """Odd ends, K in phases, every epilogue, an infinity; by the float rule; a token's bits alone."""
    if form == "gfx90a" and (dtype != torch.float16 or FORMATS[name].library not in ("gemv", "gemv_fp8")):
        pytest.skip("as gfx942's")
    if form == "alone" and name not in ("plain", "int8", "int4_g32_minimum"):
        pytest.skip("as by clusters, but for what waves leave each other")
    torch.manual_seed(0)
    assert check_small(made(form), name, dtype, "cpu") == []


@pytest.mark.each_value
@pytest.mark.parametrize(
    "form, name",
    [
        case(form, name, repeats=form != "nvidia" and name not in ("plain", "int8"))
        for form in ("nvidia", "alone", "gfx942")
        for name in ("plain", "fp8", "compact", "int8", "int4_g128_minimum")
    ],
)
def test_a_product_signals_its_columns_to_the_next(form: str, name: str, made: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    assert check_signals(made(form), name, torch.bfloat16, "cpu", overlaps=form != "gfx942") == []


@pytest.mark.parametrize("name", ["plain", "fp8", "compact", "int8", "int4_g128_minimum"])
def test_what_is_signalled_may_come_later_than_its_count(name: str, made: Callable[[str], Emulated]) -> None:
    """Some words are not there when they are first read."""
    torch.manual_seed(0)
    library, columns = made("nvidia"), 4096 + 528
    weight = pack(torch.randn(80, columns) / columns**0.5, name, dtype=torch.bfloat16)
    x, want, y = torch.randn(1, columns).bfloat16(), *torch.empty(2, 1, 80, dtype=torch.bfloat16)
    library.call(weight, x, want)
    late, flag = x.clone(), torch.tensor([4096, 0], dtype=torch.int32)
    late.view(torch.int16)[:, torch.randperm(4096)[:40]] = binding.SENTINEL
    address = (ctypes.c_void_p(one.data_ptr()) for one in (late, x))
    library.held.owe(*address, ctypes.c_int64(late.nbytes))
    library.call(weight, late, y, consumer=flag.data_ptr(), consumer_columns=4096)
    assert library.held.still_owed() == 0
    assert torch.equal(y, want)


@pytest.mark.parametrize("name", ["plain", "fp8", "int8", "int4_g128"])
def test_nothing_is_copied_where_a_wave_has_no_tile(name: str, made: Callable[[str], Emulated]) -> None:
    """Zeros in place of weights would delay the end of a product."""
    torch.manual_seed(0)
    library = made("nvidia")
    weight, x = pack(torch.randn(80, 1024) / 32, name, dtype=torch.bfloat16), torch.randn(1, 1024, dtype=torch.bfloat16)
    library.held.take_zeros()
    assert wrong(run(library, weight, x, {}), weight.dense, x, {}) == ""
    assert library.held.take_zeros() == 0


@pytest.mark.parametrize("tokens", [3, 8])
def test_what_waves_of_a_cluster_send_each_other_may_be_late(tokens: int, made: Callable[[str], Emulated]) -> None:
    """Waves that are rounds apart from each other never send to a box that is still to be read."""
    torch.manual_seed(0)
    library = made("nvidia")
    weight = pack(torch.randn(1000, 512) / 23, "int8", dtype=torch.bfloat16)
    x = torch.randn(tokens, 512, dtype=torch.bfloat16)
    want = run(library, weight, x, {})
    try:
        for trial in range(8):
            library.held.set_delay((40, 400)[trial % 2], trial)
            assert torch.equal(run(library, weight, x, {}), want)
    finally:
        library.held.set_delay(0, 0)


@pytest.fixture
def finite(made: Callable[[str], Emulated]) -> Iterator[Callable[[str], Emulated]]:
    """`made`, with a number in shared memory that nobody wrote: that product makes again what is no number."""
    touched = []

    def library(form: str) -> Emulated:
        touched.append(made(form))
        touched[-1].held.set_shared(0x3E)
        touched[-1].held.take_unwaited()
        return touched[-1]

    yield library
    for one in touched:
        one.held.set_shared(0xFF)
        assert one.held.take_unwaited() == 0, "sums lie where copies may still come"


@pytest.mark.each_value
@pytest.mark.parametrize("name, dtype", [(name, binding.DTYPES[i % 2]) for i, name in enumerate(ROWS_FORMATS)], ids=str)
@pytest.mark.parametrize("form", ["nvidia", "gfx942"])
def test_many_tokens(name: str, dtype: torch.dtype, form: str, finite: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    assert check_rows(finite(form), name, dtype, "cpu") == []


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", binding.DTYPES, ids=str)
def test_many_tokens_by_clusters(dtype: torch.dtype, cluster: int, finite: Callable[[str], Emulated]) -> None:
    torch.manual_seed(0)
    assert check_rows(finite("nvidia"), "int4_g128_minimum", dtype, "cpu", blocks=cluster) == []
