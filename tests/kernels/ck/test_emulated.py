"""Composable Kernel's binding, host checks and element operation on a CPU: the product itself is done by loops."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.ck import binding
from accelpatch.kernels.ck.binding import GemmArgs
from accelpatch.kernels.compiling.ck_libraries import CK_LIBRARIES, FORMS, OUTPUTS, TILES
from accelpatch.kernels.ops.linear import gemm_w8a8
from accelpatch.kernels.spec import Spec

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
HEADERS = Path(binding.__file__).parent
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
ran: Counter[str] = Counter()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("ck") / "emulated.so"
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{HEADERS}")
    source = Path(__file__).with_name("emulated.cpp")
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(made)], check=True, timeout=300)
    return ctypes.CDLL(str(made))


@pytest.fixture
def run(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`binding.gemm_w8a8` with the emulated libraries; outputs are filled with NaN or the largest integer before."""

    def entry(name: str, device: torch.device) -> Any:
        def launch(args: Any, stream: int) -> int:
            ran[name] += 1
            return int(library.emulated(*numbers(name), args, 0))

        return launch

    monkeypatch.setattr(binding, "_entry", entry)
    monkeypatch.setattr(binding, "stream_of", lambda tensor: 0)
    monkeypatch.setattr(binding, "on_device", lambda tensor: nullcontext())
    ran.clear()
    torch.use_deterministic_algorithms(True)
    yield binding.gemm_w8a8
    torch.use_deterministic_algorithms(False)


def numbers(name: str) -> tuple[int, int, int]:
    """The form, output and tile of a library, as its flags have them."""
    [flags] = CK_LIBRARIES[name].values()
    form, output, tile = (int(flag.partition("=")[2]) for flag in flags)
    return form, output, tile


def made(m: int, n: int, k: int, dtype: torch.dtype, form: str, batch: int = 0, vector: bool = False) -> list[Any]:
    """Arguments of gemm_w8a8, from the whole range of int8."""
    generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    before = (batch,) if batch else ()

    def integers(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    with_d, scaled = form in ("linear", "scaled_bias"), form.startswith("scaled")
    d = integers(n) if vector else integers(*before, m, n)
    d = d if dtype == torch.int8 else (d / 3).to(dtype)
    rows, columns = torch.rand(m, generator=generator) + 0.1, torch.rand(n, generator=generator) + 0.1
    alpha = 100 / (128 * 128 * k**0.5)
    return [integers(*before, m, k), integers(*before, n, k), alpha, rows if scaled else None,
            columns if scaled else None, d if with_d else None, 0.75, None, "none", None, dtype]  # fmt: skip


def exactly(run: Any, args: list[Any]) -> Tensor:
    """The result, the same as plain torch's in every bit."""
    found, due = run(*args), gemm_w8a8.by_torch(*args)
    assert found.dtype == due.dtype
    assert found.is_contiguous()
    assert torch.equal(found, due)
    return found


SIZES = ((1, 64, 64), (7, 33, 130), (129, 65, 96), (5, 48, 16), (1, 1, 1), (2, 16, 1040))


@pytest.mark.parametrize("dtype", binding.DTYPES, ids=OUTPUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m, n, k", SIZES, ids=lambda size: str(size))
def test_the_numbers_are_those_of_torch(run: Any, form: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    found = exactly(run, made(m, n, k, dtype, form))
    tile = "any" if k % 16 or (not form.startswith("scaled") and n % (16 // dtype.itemsize)) else "64x128"
    assert ran == {f"ck_{form}_{OUTPUTS[binding.DTYPES.index(dtype)]}_{tile}": 1}
    assert m * n < 100 or found.float().std() > 1, "all saturated, or all nothing"


@pytest.mark.parametrize("dtype", binding.DTYPES, ids=OUTPUTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_with_d_as_a_matrix_and_as_a_vector(run: Any, form: str, dtype: torch.dtype) -> None:
    for vector in (False, True):
        exactly(run, made(9, 32, 48, dtype, form, batch=3, vector=vector))


@pytest.mark.parametrize("form", FORMS)
def test_relu(run: Any, form: str) -> None:
    args = made(33, 64, 32, torch.int8, form)
    args[2], args[8] = args[2] * 4, "relu"
    found = exactly(run, args)
    assert int(found.min()) == 0
    assert int(found.max()) == 127


@pytest.mark.parametrize("name, at", [("row_scale", 3), ("column_scale", 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_vector_of_scales_of_another_dtype(run: Any, name: str, at: int, dtype: torch.dtype) -> None:
    args = made(9, 32, 48, torch.float32, "scaled_bias")
    args[3], args[4] = (one.to(dtype) if i == at else None for i, one in ((3, args[3]), (4, args[4])))
    exactly(run, args)


def test_a_row_with_a_scale_that_is_no_number(run: Any) -> None:
    args = made(3, 32, 32, torch.bfloat16, "scaled")
    args[3][1] = torch.nan
    found = run(*args)
    assert found[1].isnan().all()
    assert not found[[0, 2]].isnan().any()


@pytest.mark.parametrize("m, n", [(0, 16), (0, 7)], ids=str)
def test_no_rows(run: Any, m: int, n: int) -> None:
    found = run(*made(m, n, 32, torch.float16, "linear"))
    assert found.shape == (0, n)
    assert not ran


def test_strided_and_offset_views(run: Any) -> None:
    args = made(6, 32, 48, torch.float32, "linear")
    for at in (0, 1, 5):
        wide = torch.nn.functional.pad(args[at], (3, 2)) if args[at].dtype != torch.int8 else torch.cat(
            [torch.full((len(args[at]), 3), 77, dtype=torch.int8), args[at]], 1)  # fmt: skip
        view = wide[:, 3 : 3 + args[at].shape[1]]
        assert torch.equal(view, args[at])
        args[at] = view
    exactly(run, args)
    offset = torch.zeros(6 * 48 + 1, dtype=torch.int8)[1:].view(6, 48).copy_(args[0])
    assert offset.data_ptr() % 16
    exactly(run, [offset, *args[1:]])


def test_every_instance_is_reached(library: ctypes.CDLL) -> None:
    a, e = torch.zeros(256, 16, dtype=torch.int8), torch.zeros(256, 128)
    for name, (form, _, tile) in ((name, numbers(name)) for name in CK_LIBRARIES):
        assert library.emulated(*numbers(name), ctypes.byref(arguments(a, e, k=16)), 1) == 0, name
        odd = library.emulated(*numbers(name), ctypes.byref(arguments(a, e, k=15)), 1)
        assert odd == (0 if TILES[tile] == "any" else 1), name
        odd = library.emulated(*numbers(name), ctypes.byref(arguments(a, e, n=127)), 1)
        assert odd == (0 if TILES[tile] == "any" or form >= 2 else 1), name


def arguments(a: Tensor, e: Tensor, /, **changes: Any) -> GemmArgs:
    """Those of a product that every instance takes, with changes."""
    m, n, k = 256, 128, 16
    held = {"a": a, "b": a, "d": e, "e": e, "row_scale": e, "column_scale": e}
    spec = Spec("gemm_w8a8", {"M": m, "N": n, "K": k, "B": 1}, torch.float32, options={"scaled": True})
    args = binding.arguments(held, spec, 1.0, 1.0, "none")
    for name, value in changes.items():
        setattr(args, name, value)
    return args


LARGE = 1 << 31
REFUSED = [
    ("no rows", {"m": 0}, 1),
    ("no batch", {"batch": 0}, 1),
    ("too long", {"k": 1 << 17, "a_stride": 1 << 17, "b_stride": 1 << 17}, 1),
    ("rows beyond 32 bits", {"m": 1 << 40}, 1),
    ("a of 2^31 bytes", {"a_stride": LARGE // 256}, 1),
    ("a of 2^31 bytes by rows of padding", {"m": 255, "a_stride": LARGE // 256}, 1),
    ("a of 2^31 bytes by padding along K", {"k": 4080, "a_stride": LARGE // 256 - 16, "b_stride": 4080}, 1),
    ("a whose stride is 2^31", {"a_stride": LARGE}, 1),
    ("a whose last batch begins at 2^31", {"batch": 3, "a_batch_stride": LARGE // 2}, 1),
    ("b of 2^31 bytes by rows of padding", {"n": 127, "b_stride": LARGE // 128}, 1),
    ("e of 2^31 bytes by rows of padding", {"m": 255, "e_stride": LARGE // 256 // 4}, 1),
    ("e whose last batch begins at 2^31", {"batch": 3, "e_batch_stride": LARGE // 2}, 1),
    ("d of 2^31 bytes by rows of padding", {"m": 255, "d_stride": LARGE // 256 // 4}, 1),
    ("too many blocks", {"batch": LARGE - 1, "m": 1 << 20}, 1),
    ("no a", {"a": None}, 2),
    ("no d", {"d": None}, 2),
    ("no row_scale", {"row_scale": None}, 2),
    ("no column_scale", {"column_scale": None}, 2),
    ("no e", {"e": None}, 2),
    ("rows of a that overlap", {"a_stride": 8}, 3),
    ("rows of b that overlap", {"b_stride": 0}, 3),
    ("rows of e that overlap", {"e_stride": 64}, 3),
    ("rows of d that overlap", {"d_stride": 64}, 3),
    ("a negative stride", {"a_stride": -16}, 3),
    ("rows of a that are not on vectors", {"a_stride": 24}, 2),
    ("batches of b that are not on vectors", {"b_batch_stride": 24, "batch": 2}, 2),
]


@pytest.mark.parametrize("changes, status", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_the_host_refuses(library: ctypes.CDLL, changes: dict[str, Any], status: int) -> None:
    a, e = torch.zeros(256, 16, dtype=torch.int8), torch.zeros(256, 128)
    instance = numbers("ck_scaled_bias_fp32_128x128")
    assert library.emulated(*instance, ctypes.byref(arguments(a, e)), 1) == 0
    assert library.emulated(*instance, ctypes.byref(arguments(a, e, **changes)), 1) == status
    with pytest.raises(KernelError, match="was not launched"):
        binding.check(status)


MOST = [
    ("many rows", {"m": 1 << 20, "k": 1024, "a_stride": 1024, "b_stride": 1024}),
    ("a", {"a_stride": LARGE // 256 - 16}),
    ("a with padding along K", {"k": 4032, "a_stride": LARGE // 256 - 16, "b_stride": 4032}),
    ("b", {"n": 127, "b_stride": LARGE // 128 - 16}),
    ("e", {"m": 255, "e_stride": LARGE // 256 // 4 - 1}),
    ("d", {"m": 255, "d_stride": LARGE // 256 // 4 - 1}),
    ("batches", {"batch": 3, "a_batch_stride": LARGE // 2 - 16}),
    ("K", {"k": (1 << 17) - 16, "a_stride": 1 << 17, "b_stride": 1 << 17}),
]


@pytest.mark.parametrize("changes", [case[1] for case in MOST], ids=[case[0] for case in MOST])
def test_the_largest_that_the_host_takes(library: ctypes.CDLL, changes: dict[str, Any]) -> None:
    a, e = torch.zeros(256, 16, dtype=torch.int8), torch.zeros(256, 128)
    assert library.emulated(*numbers("ck_scaled_bias_fp32_128x128"), ctypes.byref(arguments(a, e, **changes)), 1) == 0


@pytest.mark.parametrize("relu", [False, True], ids=["none", "relu"])
@pytest.mark.parametrize("with_d", [False, True], ids=["c", "c and d"])
def test_the_element_operation(library: ctypes.CDLL, relu: bool, with_d: bool) -> None:
    """Ties, saturation and sums of any size, against ops/linear/gemm_w8a8.py."""
    generator = torch.Generator().manual_seed(0)
    for alpha, beta in itertools.product((0.5, 2.0**-20, 0.013, -0.25, 1e-7, 3.0), (0.5, -1.0, 0.37)):
        bits = torch.randint(1, 32, (4096,), generator=generator)
        c = (torch.randint(-(2**31), 2**31, (4096,), generator=generator) >> (31 - bits)).to(torch.int32)
        d = torch.randint(-128, 128, (4096,), generator=generator, dtype=torch.int8)
        e = torch.full((4096,), 99, dtype=torch.int8)
        library.finish(
            ctypes.c_void_p(c.data_ptr()), ctypes.c_void_p(d.data_ptr() if with_d else None), ctypes.c_float(alpha),
            ctypes.c_float(beta), int(relu), ctypes.c_int64(4096), ctypes.c_void_p(e.data_ptr()),
        )  # fmt: skip
        activation = "relu" if relu else "none"
        due = gemm_w8a8.finished(
            c[None], alpha, None, None, d[None] if with_d else None, beta, None, activation, None, torch.int8
        )
        assert torch.equal(e, due[0]), (alpha, beta)


@pytest.mark.parametrize("c, due", [(1, 0), (3, 2), (5, 2), (-1, 0), (-3, -2), (255, 127), (-257, -128), (-255, -128)])
def test_ties_go_to_even_and_the_rest_saturates(library: ctypes.CDLL, c: int, due: int) -> None:
    e = ctypes.c_int8(99)
    half, one = ctypes.c_float(0.5), ctypes.c_float(1.0)
    library.finish(ctypes.byref(ctypes.c_int32(c)), None, half, one, 0, ctypes.c_int64(1), ctypes.byref(e))
    assert e.value == due


def test_floats_are_rounded_as_by_torch(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).to(torch.int32).view(torch.float32)
    y = torch.cat([y, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 65520.0, 1e-40])])
    bf16, fp16 = torch.empty(len(y), dtype=torch.bfloat16), torch.empty(len(y), dtype=torch.float16)
    pointers = [ctypes.c_void_p(one.data_ptr()) for one in (y, bf16, fp16)]
    library.stored(pointers[0], ctypes.c_int64(len(y)), *pointers[1:])
    for found in (bf16, fp16):
        due = y.to(found.dtype)
        assert torch.equal(found.isnan(), due.isnan())
        assert torch.equal(found.nan_to_num(), due.nan_to_num())
