"""The device library's experts without a device: NVIDIA's and AMD's forms compiled for the CPU by the SIMT emulator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip import experts as launched
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops import experts
from accelpatch.kernels.ops.expert_cases import in_tiles, of_random
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support.interpreted import DEVICE
from tests.support.parity import name

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_experts_on_gpu.py is for a GPU"),
]
SOURCES = ("experts_int4.hip", "experts_int4_32.hip", "experts_int4_64.hip")
FORMS = ("nvidia", "gfx942")
Run = Callable[..., Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(form, args, **tuning): y of the operation's arguments, its outputs poisoned."""

    @functools.cache
    def library(form: str) -> ctypes.CDLL:
        held = compiled(form, SOURCES, "experts", tmp_path_factory)
        held.set_emulator(4, 1, 0)
        return held

    def of(form: str, args: tuple[Any, ...], **tuning: int) -> Tensor:
        x, ids, weights, up, down = *args[:3], Stack(*args[3:7]), Stack(*args[7:11])
        h, y = x.new_full((len(ids), ids.shape[1] * up.rows // 2), float("nan")), torch.full_like(x, float("nan"))
        for one in launched.launches(x, ids, weights, up, down, h, y, args[14]):
            for key, value in tuning.items():
                setattr(one.gemv, key, value)
            beside = ctypes.byref(one.gemv), ctypes.byref(one.experts), binding.DTYPES.index(x.dtype), one.form
            status = launched.declared(library(form), one.function)(*beside, None)
            binding.check(status, one.function)
        return y

    return of


def made(
    sizes: tuple[int, int, int], tokens: int, chosen: int, groups: tuple[int, int], dtype: torch.dtype,
    symmetric: bool = False, odd: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments for experts of (E, H, I). odd: some ids are none, weights are float32, and there is a residual."""
    (number, width, inner), generator = sizes, torch.Generator().manual_seed(tokens + chosen)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    ids = torch.randint(-odd, number + odd, (tokens, chosen), generator=generator)
    weights = torch.rand(tokens, chosen, generator=generator).to(torch.float32 if odd else dtype)
    up, down = (
        of_random(generator, dtype, torch.device("cpu"), 4, number, n, k, group, False, symmetric)
        for (n, k), group in zip(((2 * inner, width), (width, inner)), groups, strict=True)
    )
    rest = "silu", 0.0, 0.0, x.flip(0) if odd else None
    return x, ids, weights, *(part for one in in_tiles(up, down, inner) for part in one), *rest


def assert_float_rule(args: tuple[Any, ...], y: Tensor) -> None:
    found = parity.check(experts.OP, args, (y,))[0]
    assert found.ok, found.reason


#: (E, H, I), tokens, chosen, groups of gate and up and of down (0: rows), symmetric, odd
CASES = {
    "one step": ((4, 128, 128), 1, 2, (128, 128), True, False),
    "groups of 32": ((3, 256, 128), 2, 2, (32, 32), False, True),
    "groups of 64": ((3, 256, 384), 1, 3, (64, 64), False, True),
    "symmetric 32": ((2, 128, 256), 1, 2, (32, 32), True, True),
    "symmetric 64": ((2, 256, 256), 1, 1, (64, 64), True, False),
    "two kinds of groups": ((3, 256, 128), 1, 2, (256, 32), False, True),
    "rows": ((2, 512, 384), 2, 2, (0, 0), False, True),
    "steps of two experts in a stage": ((5, 256, 640), 1, 5, (128, 128), False, True),
    "eight experts, three tokens": ((16, 384, 256), 3, 8, (128, 128), False, False),
}


@pytest.mark.parametrize("dtype", binding.DTYPES, ids=name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_float_rule(form: str, case: str, dtype: torch.dtype, run: Run) -> None:
    sizes, tokens, chosen, groups, symmetric, odd = CASES[case]
    args = made(sizes, tokens, chosen, groups, dtype, symmetric, odd)
    assert_float_rule(args, run(form, args))


@pytest.mark.parametrize("form, inner", [("nvidia", 12288), ("gfx942", 4096)])
def test_activations_that_shared_memory_does_not_hold(form: str, inner: int, run: Run) -> None:
    """They are staged in K tiles, anew for each tile of rows."""
    args = made((1, 128, inner), 1, 8, (128, 128), torch.bfloat16, odd=True)
    assert_float_rule(args, run(form, args))


@pytest.mark.parametrize("form", FORMS)
def test_a_tokens_bits_depend_on_nothing_beside_it(form: str, run: Run) -> None:
    """Nor on how many blocks there are, nor on the multi-stage buffer."""
    args = made((6, 256, 384), 4, 3, (64, 128), torch.bfloat16)
    both = run(form, args)
    for token in range(4):
        alone = tuple(one[token : token + 1] if place < 3 else one for place, one in enumerate(args))
        assert torch.equal(run(form, alone)[0], both[token])
    for tuning in ({"blocks": 1}, {"blocks": 9}, {"shallow": 1}):
        assert torch.equal(run(form, args, **tuning), both)


@pytest.mark.parametrize("form", FORMS)
def test_ids_of_32_bits_and_weights_of_any_dtype(form: str, run: Run) -> None:
    args = made((4, 128, 128), 2, 2, (128, 128), torch.float16, odd=True)
    expected = run(form, args)
    assert torch.equal(run(form, (args[0], args[1].int(), *args[2:])), expected)
    for dtype in (torch.bfloat16, torch.float16):
        other = (*args[:2], args[2].to(dtype), *args[3:])
        assert_float_rule(other, run(form, other))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_id_adds_nothing(form: str, run: Run) -> None:
    """Not even where its lower half is one, or its weight no number."""
    args = made((4, 128, 256), 1, 3, (128, 128), torch.bfloat16)
    for other in (4, -1, 1 << 32, -(1 << 32), 1 << 62):
        ids, weights = args[1].clone(), args[2].clone()
        ids[0, 1:], weights[0, 1:] = other, float("nan")
        assert_float_rule((args[0], ids, weights, *args[3:]), run(form, (args[0], ids, weights, *args[3:])))
    assert torch.equal(run(form, (args[0], torch.full_like(ids, -1), *args[2:])), torch.zeros_like(args[0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_comes_out_where_the_reference_has_it(form: str, value: float, run: Run) -> None:
    args = made((3, 128, 256), 2, 2, (64, 64), torch.bfloat16, odd=True)
    args[1].clamp_(0, 2)
    for at in (0, 2):
        spoiled = list(args)
        spoiled[at] = args[at].clone()
        spoiled[at].view(-1)[1] = value
        y, due = run(form, tuple(spoiled)), dispatch.kernel(experts.OP).reference(*spoiled)
        assert torch.equal(y.isnan(), due.isnan())
        assert torch.equal(y.isfinite(), due.isfinite())
        assert torch.equal(y[1], run(form, args)[1])


@pytest.mark.parametrize("form", FORMS)
def test_small_values_and_rows_that_are_not_aligned(form: str, run: Run) -> None:
    args = made((3, 128, 128), 2, 2, (32, 32), torch.bfloat16, odd=True)
    for scale in (2.0**-120, 2.0**-60):
        small = (args[0] * scale, *args[1:14], None)
        assert_float_rule(small, run(form, small))
    held = torch.zeros(2 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 128)
    held.copy_(args[0])
    assert torch.equal(run(form, (held, *args[1:])), run(form, args))


def test_what_is_refused(run: Run) -> None:
    args = made((3, 128, 128), 1, 2, (128, 128), torch.bfloat16)
    for tuning in ({"m": 2}, {"norm": 1}, {"k": 64}, {"group_shift": -1}, {"activation": 2}, {"scale": None}):
        with pytest.raises(KernelError, match="was not launched"):
            run("nvidia", args, **tuning)
