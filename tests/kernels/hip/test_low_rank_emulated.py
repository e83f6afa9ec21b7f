"""Products with LoRA inside without a device: NVIDIA's and AMD's forms compiled for the CPU by the SIMT emulator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch

from accelpatch.errors import KernelError
from accelpatch.kernels.hip.low_rank import MOST_RANKS, SUFFIX, concatenated
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support.hip_gemv import FORMATS, Emulated, pack
from tests.support.interpreted import DEVICE
from tests.support.low_rank import adapters, check_low_rank

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_low_rank_on_gpu.py is for a GPU"),
]
NAMES = ("plain", "int8", "int4_g128_minimum", "int4_g32", "nf4_g64")
CASES = [(form, name) for form in ("nvidia", "gfx942") for name in NAMES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Emulated]:
    @functools.cache
    def library(form: str, function: str) -> ctypes.CDLL:
        held = compiled(form, [f"gemv/{function}{SUFFIX}.hip"], f"{function}{SUFFIX}", tmp_path_factory)
        held.set_emulator(4, 1, 0)
        held.set_beside(1)  # blocks wait for each other
        return held

    return lambda form, name: Emulated(library(form, FORMATS[name].library), SUFFIX)


@pytest.mark.each_value
@pytest.mark.parametrize("form, name", [pytest.param(*one, marks=pytest.mark.nightly if one[1] in NAMES[3:] else ())
                                        for one in CASES])  # fmt: skip
def test_adapters_inside_a_product(form: str, name: str, made: Callable[[str, str], Emulated]) -> None:
    torch.manual_seed(0)
    assert check_low_rank(made(form, name), name, torch.bfloat16, "cpu", meets=form == "nvidia") == []


def test_fp16(made: Callable[[str, str], Emulated]) -> None:
    torch.manual_seed(0)
    assert check_low_rank(made("nvidia", "plain"), "plain", torch.float16, "cpu") == []


@pytest.mark.parametrize("most", [0, 40, 400])
def test_sums_that_come_late_are_waited_for(most: int, made: Callable[[str, str], Emulated]) -> None:
    """What another block stores is there after some time; a NaN among the inputs is not taken for nothing."""
    torch.manual_seed(0)
    library = made("nvidia", "plain")
    p = pack(torch.randn(160, 512) / 23, "plain", dtype=torch.bfloat16)
    low, x = adapters(p, torch.bfloat16, 16, (0, 64, 112)), torch.randn(2, 512).bfloat16()
    x[1, 3] = float("nan")
    y, due = torch.empty(2, 160).bfloat16(), low.beside(p.dense) @ x[0].double()
    try:
        library.held.set_delay(most, 1)
        library.call(p, x, y, **low.arguments())
    finally:
        library.held.set_delay(0, 0)
    assert low.reset
    assert y[1].isnan().all()
    assert (y[0].double() - due).abs().max() < 0.02


@pytest.mark.parametrize("changes", [{"rank": 12}, {"ranks": 8 * (MOST_RANKS + 8)}, {"low": 0}, {"up": 8}], ids=str)
def test_what_does_not_fit_is_not_launched(changes: dict[str, int], made: Callable[[str, str], Emulated]) -> None:
    p = pack(torch.randn(16, 64), "plain", dtype=torch.bfloat16)
    low, x = adapters(p, torch.bfloat16, 8, (0,)), torch.randn(1, 64).bfloat16()
    with pytest.raises(KernelError, match="was not launched"):
        made("nvidia", "plain").call(p, x, torch.empty(1, 16).bfloat16(), **low.arguments() | changes)


def test_ranks_of_parts_are_padded_alike() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(3, 20), torch.randn(6, 3)), None, (torch.randn(9, 20), torch.randn(5, 9))]
    low = concatenated(parts, [6, 4, 5], torch.empty(0))
    assert (low.rank, low.ranks, low.starts) == (16, 48, (0, 6, 10))
    due = torch.cat([parts[0][1] @ parts[0][0], torch.zeros(4, 20), parts[2][1] @ parts[2][0]])  # type: ignore[index]
    torch.testing.assert_close(low.wide_up() @ low.down, due)
