"""The device library's attention over caches of 8-bit codes, without a device: as test_attention_emulated.py.

What lies in the cache after a launch is held to another computation of its rounding, and the output to float64
attention over that; a row's tokens get the same bits in any company, and whichever block has which KV split.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.check.attention_check import Step
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts.kv_states import LARGEST
from accelpatch.kernels.ops.attention.decode_attention import reference_
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.kernels.hip.test_attention_emulated import LONG, WIDEST, WINDOWS
from tests.kernels.ops.attention.test_decode_attention import CASES, SAME
from tests.support.cache_formats import assert_codes, assert_same_bits, assert_sums, quantized
from tests.support.interpreted import DEVICE
from tests.support.parity import bits
from tests.support.spread import spread

pytestmark = [
    pytest.mark.each_value,
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU"),
]
FORMS = list(LARGEST)


def wide(case: Step) -> bool:
    """Whether heads are what kernels take: a multiple of 16 columns."""
    return case.size % 16 == 0


ONE_BY_ONE = {name: case for name, case in (CASES | LONG | WINDOWS).items() if wide(case)}
MANY = {name: case for name, case in (SAME | LONG).items() if wide(case)}


@pytest.fixture(scope="module", params=WIDEST)
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def library(vendor: str, form: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    held: Any = compiled(vendor, [f"attention/decode_attention_{form}.hip"], f"attention_{form}", tmp_path_factory)
    held.set_beside(1)
    held.overlaps = vendor != "gfx942"
    held.entry = getattr(held, f"accelpatch_decode_attention_{form}")
    return held


def _op(library: Any) -> Callable[..., Tensor]:
    def decode_attention_(*args: Any) -> Tensor:
        qkv, positions, slot, mask, keys, values, shape = args
        y = torch.full((*qkv.shape[:-1], shape.heads * shape.size), float("nan"), dtype=qkv.dtype)
        columns = (shape.heads + shape.kv_heads) * shape.size
        signal = Signal(torch.tensor([columns, 0], dtype=torch.int32), columns, qkv)
        with binding.weight_prefetch():
            given = attention.arguments(qkv, y, positions, slot, mask, keys, values, shape, None, signal)
        assert library.entry(ctypes.byref(given), binding.DTYPES.index(qkv.dtype), ctypes.c_void_p()) == 0
        assert not any(one.any() for one in shape.memory.buffers)
        return y

    return decode_attention_


def _fits(vendor: str, case: Step) -> None:
    if case.size > WIDEST[vendor]:
        pytest.skip(f"{vendor}: heads of up to {WIDEST[vendor]} columns")
    if vendor == "ampere" and case.size != 128:
        pytest.skip("as for Hopper but for where copies begin, whatever the size")


@spread("case, late", ONE_BY_ONE, {"at-once": (0, 1), "late": (1, 0)})
def test_float_rule(case: Step, late: tuple[int, int], vendor: str, form: str, library: Any) -> None:
    _fits(vendor, case)
    library.set_emulator(5, *late)
    args, shape = quantized(case, torch.bfloat16, form, DEVICE)
    plain, _ = quantized(case, torch.bfloat16, form, DEVICE)
    y = _op(library)(*args, shape)
    assert_codes(case, args, shape, form)
    assert_sums(case, args, shape, y, (reference_(*plain, shape), plain))


@spread("case, processors", MANY, [1, 8])
def test_a_token_gets_the_bits_that_it_gets_alone(
    case: Step, processors: int, vendor: str, form: str, library: Any
) -> None:
    _fits(vendor, case)
    library.set_emulator(processors, 1, 0)
    assert_same_bits(_op(library), case, torch.bfloat16, form, DEVICE)


@pytest.mark.parametrize("name", ["ten-spans", "five-nodes", "claimed-spans", "rows-of-many-lengths"])
def test_the_bits_do_not_depend_on_which_block_has_what(name: str, vendor: str, form: str, library: Any) -> None:
    _fits(vendor, LONG[name])
    found = []
    for processors in (1, 3, 8):
        library.set_emulator(processors, processors % 2, processors % 3 == 0)
        args, shape = quantized(LONG[name], torch.bfloat16, form, DEVICE)
        found.append(_op(library)(*args, shape))
    assert all(torch.equal(bits(one), bits(found[0])) for one in found)


def test_a_new_key_that_is_no_number(vendor: str, form: str, library: Any) -> None:
    """Its row of the cache is NaN, and so is what sees it; other heads and rows are as they were."""
    case = Step(size=128, rows=2)
    library.set_emulator(3, 1, 0)
    args, shape = quantized(case, torch.bfloat16, form, DEVICE)
    args[0][0, shape.heads * shape.size + 3] = float("nan")
    y = _op(library)(*args, shape).view(2, shape.heads, shape.size)
    assert y[0, :2].isnan().all()  # the heads of queries that the key belongs to
    assert y[0, 2:].isfinite().all()
    assert y[1].isfinite().all()
    assert args[4][0, 0, case.slot].isnan().all()


def test_magnitudes_far_apart(vendor: str, form: str, library: Any) -> None:
    """Queries with an outlier, and values whose scales differ by up to 2^20, are no less precise for it."""
    case = Step(size=128, rows=2, slot=300, capacity=320)
    library.set_emulator(3, 0, 1)
    given = [quantized(case, torch.bfloat16, form, DEVICE) for _ in range(2)]
    exponents = torch.randint(-10, 11, given[0][0][5].scale.shape, generator=torch.Generator().manual_seed(3))
    for (qkv, *_, values), _ in given:
        qkv[:, 5] *= 64
        values.scale.mul_(2.0 ** exponents.to(torch.float32))
    (args, shape), (plain, _) = given
    y = _op(library)(*args, shape)
    assert_sums(case, args, shape, y, (reference_(*plain, shape), plain))


def test_what_does_not_fit_is_refused(vendor: str, form: str, library: Any) -> None:
    args, shape = quantized(Step(size=128), torch.bfloat16, form, DEVICE)
    qkv, positions, slot, mask, keys, values = args
    y = torch.empty(2, shape.heads * shape.size, dtype=qkv.dtype)
    given = attention.arguments(qkv, y, positions, slot, mask, keys, values, shape, None)
    assert library.entry(ctypes.byref(given), 1, ctypes.c_void_p()) == 4  # fp16: no such kernel
    given.key_scales = None
    assert library.entry(ctypes.byref(given), 0, ctypes.c_void_p()) == 2
    args, shape = quantized(Step(size=72), torch.bfloat16, form, DEVICE)
    y = torch.empty(2, shape.heads * shape.size, dtype=qkv.dtype)
    given = attention.arguments(args[0], y, *args[1:], shape, None)
    assert library.entry(ctypes.byref(given), 0, ctypes.c_void_p()) == 1
