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
from accelpatch.kernels.hip.experts import binding as launched
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import experts, routed_experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random
from tests.kernels.hip.simt_emulator import COMPILER, compiled
from tests.support.interpreted import DEVICE
from tests.support.spread import spread

pytestmark = [
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU; test_experts_on_gpu.py is for a GPU"),
]
SOURCES = ("experts/experts_int4.hip", "experts/experts_int4_32.hip", "experts/experts_int4_64.hip")
FORMS = ("nvidia", "gfx942")
Run = Callable[..., Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(form, args, hidden, **tuning): y of the arguments of `experts` or `routed_experts`, its outputs poisoned.

    hidden: takes what goes into down, [T, k I].
    """

    @functools.cache
    def library(form: str) -> ctypes.CDLL:
        held = compiled(form, SOURCES, "experts", tmp_path_factory)
        held.set_emulator(4, 1, 0)
        return held

    def of(form: str, args: tuple[Any, ...], hidden: list[Tensor] | None = None, **tuning: int) -> Tensor:
        (x, *routing), up, down, residual = args[:-12], Stack(*args[-12:-8]), Stack(*args[-8:-4]), args[-1]
        to: launched.Routing = (
            launched.ChosenExperts(*routing) if len(routing) == 2 else launched.RouterLogits(*routing[3:])
        )
        norm = None if len(routing) == 2 or routing[0] is None else launched.Norm(*routing[:3])
        h, y = x.new_full((len(x), to.chosen * up.n // 2), float("nan")), torch.full_like(x, float("nan"))
        for one in launched.launches(x, to, up, down, h, y, residual, norm):
            for key, value in tuning.items():
                setattr(one.gemv, key, value)
            beside = ctypes.byref(one.gemv), ctypes.byref(one.experts), binding.DTYPES.index(x.dtype), one.group_size
            status = launched.declared(library(form), one.function)(*beside, None)
            binding.check(status, one.function)
        if hidden is not None:
            hidden.append(h)
        return y

    return of


def made(
    sizes: tuple[int, int, int], tokens: int, chosen: int, groups: tuple[int, int], dtype: torch.dtype,
    symmetric: bool = False, odd: bool = False, codes: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments for experts of (E, H, I). odd: some ids are none, weights are float32, and there is a residual."""
    (number, width, inner), generator = sizes, torch.Generator().manual_seed(tokens + chosen)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    ids = torch.randint(-odd, number + odd, (tokens, chosen), generator=generator)
    weights = torch.rand(tokens, chosen, generator=generator).to(torch.float32 if odd else dtype)
    up, down = (
        of_random(generator, dtype, torch.device("cpu"), 4, number, n, k, group, False, symmetric, codes)
        for (n, k), group in zip(((2 * inner, width), (width, inner)), groups, strict=True)
    )
    rest = "silu", 0.0, 0.0, x.flip(0) if odd else None
    return x, ids, weights, *(part for one in in_tiles(up, down, inner) for part in one), *rest


def routed(
    args: tuple[Any, ...], logits: Tensor, normalise: bool, narrow: bool, plus_one: bool = False
) -> tuple[Any, ...]:
    """The arguments of `routed_experts` in place of those of `experts`."""
    x, ids, _, *rest = args
    weight = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(3)).to(x.dtype)
    return x, weight, 1e-5, plus_one, logits, ids.shape[1], normalise, narrow, *rest


def assert_float_rule(args: tuple[Any, ...], y: Tensor) -> None:
    found = parity.check(experts.OP if len(args) == 15 else routed_experts.OP, args, (y,))[0]
    assert found.ok, found.reason


#: (E, H, I), tokens, chosen, groups of gate and up and of down (0: rows), symmetric, odd, codes
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
    "e2m1": ((3, 256, 384), 2, 2, (32, 32), True, True, "e2m1"),
    "e2m1, one expert": ((2, 128, 128), 1, 1, (32, 32), True, False, "e2m1"),
}


@pytest.mark.each_value
@spread("form, case, dtype", FORMS, CASES.keys(), binding.DTYPES)
def test_float_rule(form: str, case: str, dtype: torch.dtype, run: Run) -> None:
    sizes, tokens, chosen, groups, *rest = CASES[case]
    args = made(sizes, tokens, chosen, groups, dtype, *rest)
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


#: (E, H, I), tokens, chosen, groups, normalise, narrow, plus_one
ROUTED = {
    "mixtral's": ((8, 256, 128), 1, 2, (128, 128), True, False, False),
    "qwen's, three tokens": ((128, 128, 128), 3, 8, (128, 128), True, True, False),
    "odd number": ((61, 256, 128), 2, 5, (32, 32), False, True, True),
    "all, of a long row": ((3, 4352, 128), 1, 3, (64, 64), False, False, False),
    "one": ((1, 128, 128), 2, 1, (128, 128), True, False, True),
}


def scores(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(experts)
    return torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)]).to(dtype) / 4 - 3


@pytest.mark.each_value
@spread("form, case, dtype", FORMS, ROUTED.keys(), binding.DTYPES)
def test_norm_and_choice_inside(form: str, case: str, dtype: torch.dtype, run: Run) -> None:
    (number, *size), tokens, chosen, groups, normalise, narrow, plus_one = ROUTED[case]
    args = made((number, size[0], size[1]), tokens, chosen, groups, dtype, odd=True)
    of = torch.float32 if case == "one" else dtype
    args = routed(args, scores(tokens, number, of), normalise, narrow, plus_one)
    together = run(form, args)
    assert_float_rule(args, together)
    for token in range(tokens):  # bits depend on nothing beside it
        alone = tuple(one[token : token + 1] if place in (0, 4, len(args) - 1) else one
                      for place, one in enumerate(args))  # fmt: skip
        assert torch.equal(run(form, alone, blocks=3 * token), together[token : token + 1])


def rows_of(experts: int) -> dict[str, Tensor]:
    """Logits whose order is not plain."""
    generator = torch.Generator().manual_seed(experts)
    ties = torch.randint(0, 4, (experts,), generator=generator).float()
    signs = torch.where(ties > 1, 0.0, -0.0)
    nan, infinite, some = ties.clone(), ties.clone(), torch.full((experts,), float("-inf"))
    nan[experts // 2], infinite[experts // 3] = float("nan"), float("inf")
    nan[experts - 1] = infinite[experts // 2] = float("inf")
    some[experts // 2] = 1.0
    return {"ties": ties, "zeros": signs, "nan": nan, "infinite": infinite, "all but one minus infinity": some,
            "minus infinity": torch.full((experts,), float("-inf")), "close": 1 + ties * 2.0**-12}  # fmt: skip


@pytest.mark.parametrize(
    "number, chosen, dtype",
    [(7, 3, torch.float32), (128, 8, torch.bfloat16), (515, 3, torch.float16), (12, 12, torch.float32)],
    ids=["few", "many", "more than threads", "all"],
)
@pytest.mark.parametrize("form", FORMS)
def test_the_chosen_ones_and_their_weights(form: str, number: int, chosen: int, dtype: torch.dtype, run: Run) -> None:
    """What goes into down has the bits that the ids of choose_experts give: NaN as infinity, the first of equals."""
    logits = torch.stack(list(rows_of(number).values())).to(dtype)
    x, _, _, up, *rest = made((1, 128, 128), len(logits), chosen, (128, 128), torch.bfloat16)
    many = [one.expand(number, *one.shape[1:]).clone() if isinstance(one, Tensor) else one for one in (up, *rest)]
    many[0].view(torch.int8).random_(-128, 128, generator=torch.Generator().manual_seed(1))
    order = logits.where(~logits.isnan(), float("inf"))
    for normalise, narrow in ((True, False), (False, True)):
        whole = torch.softmax(logits.float(), dim=-1)
        ids = order.sort(dim=-1, descending=True, stable=True)[1][:, :chosen].contiguous()
        weights = whole.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) if normalise else weights
        given = (x, ids, weights.to(dtype) if narrow else weights, *many)
        args = (x, None, 1e-5, False, logits, chosen, normalise, narrow, *many)
        found: list[Tensor] = []
        due, y = run(form, given, found), run(form, args, found)
        assert torch.equal(*found)
        assert torch.equal(y.isnan(), due.isnan())
        assert_float_rule(given, y)


@pytest.mark.parametrize("form", FORMS)
def test_the_longest_row_under_a_norm(form: str, run: Run) -> None:
    args = made((2, launched.MOST_NORMED, 128), 1, 2, (32, 128), torch.bfloat16)
    args = routed(args, scores(1, 2, torch.bfloat16), True, False)
    assert_float_rule(args, run(form, args))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_under_a_norm(form: str, value: float, run: Run) -> None:
    """It spoils its own token alone; an infinity in the norm's weight one value of each."""
    args = list(routed(made((3, 128, 256), 2, 2, (64, 64), torch.bfloat16), scores(2, 3, torch.bfloat16), True, True))
    whole = run(form, tuple(args))
    for at in (0, 1):
        spoiled = list(args)
        spoiled[at] = args[at].clone()
        spoiled[at].view(-1)[5] = value
        y, due = run(form, tuple(spoiled)), dispatch.kernel(routed_experts.OP).reference(*spoiled)
        assert torch.equal(y.isnan(), due.isnan())
        assert torch.equal(y.isfinite(), due.isfinite())
        assert at == 1 or torch.equal(y[1], whole[1])


def test_choices_and_norms_that_are_refused(run: Run) -> None:
    args = routed(made((3, 128, 128), 1, 2, (128, 128), torch.bfloat16), scores(1, 3, torch.bfloat16), True, True)
    for tuning in ({"norm": 3}, {"norm": 2}):  # a LayerNorm; of down
        with pytest.raises(KernelError, match="was not launched"):
            run("nvidia", args, **tuning)
    ids = made((3, 128, 128), 1, 4, (128, 128), torch.bfloat16)
    with pytest.raises(KernelError, match="was not launched"):  # four of three
        run("nvidia", routed(ids, scores(1, 3, torch.bfloat16), True, True))
