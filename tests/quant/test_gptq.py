"""GPTQ against the paper's recursion, column by column in float64; the search for ranges; what is refused."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.quant.formats import dequantize
from accelpatch.quant.gptq import Gptq, inverse_factor, nearest
from accelpatch.quant.hessian import Hessians
from accelpatch.quant.int4 import Int4Grid, quantize
from accelpatch.quant.int8 import Int8Grid

N, K, GROUP = 24, 192, 64
GRIDS = {**{kind: Int4Grid(kind) for kind in ("none", "minimum", "zero_point")}, "int8": Int8Grid()}


def problem(seed: int = 0, k: int = K) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of correlated inputs, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator).mul(3).exp()
    inputs = torch.randn(4 * k, k, generator=generator) @ mixed
    return torch.randn(N, k, generator=generator), inputs.t() @ inputs / len(inputs)


def loss(made: Any, weight: Tensor, hessian: Tensor) -> float:
    difference = dequantize(made) - weight
    return float((difference @ hessian * difference).sum())


def by_recursion(weight: Tensor, hessian: Tensor, grid: Any, damping: float, order: list[int], static: bool) -> Tensor:
    """The rounded weight by equations 2 and 3 of arXiv:2210.17323: after each column the inverse loses its row."""
    w = weight.double().clone()
    inverse = torch.linalg.inv(hessian.double() + damping * hessian.diagonal().double().mean() * torch.eye(len(order)))
    groups = weight.unflatten(1, (-1, GROUP))
    dtype = grid.storage(groups)
    fits = [grid.fit(groups[:, g : g + 1], dtype) for g in range(len(order) // GROUP)]
    made = torch.empty_like(w)
    for place, column in enumerate(order):
        g = column // GROUP
        if not static and place % GROUP == 0:
            fits[g] = grid.fit(w[:, g * GROUP : (g + 1) * GROUP].float().unsqueeze(1), dtype)
        codes = grid.codes(w[:, column, None, None].float(), *fits[g])
        made[:, column] = grid.values(codes, *fits[g])[:, 0, 0].double()
        left = order[place:]
        error = (w[:, column] - made[:, column]) / inverse[column, column]
        w[:, left] -= error[:, None] * inverse[column, left]
        inverse -= inverse[:, column, None] * inverse[None, column] / inverse[column, column]
    return made.float()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_it_is_the_papers_recursion(name: str, act_order: bool) -> None:
    weight, hessian = problem()
    order = hessian.diagonal().argsort(descending=True).tolist() if act_order else list(range(K))
    made = Gptq(act_order=act_order).rounded(weight, hessian, GRIDS[name], GROUP)
    due = by_recursion(weight, hessian, GRIDS[name], 0.01, order, act_order)
    same = (dequantize(made) - due).abs() <= 1e-5 * due.abs()
    assert float(same.float().mean()) > 0.99  # a value half way between two codes may go either way
    assert loss(made, weight, hessian) == pytest.approx(
        float(((due - weight) @ hessian * (due - weight)).sum()), rel=0.02
    )


@pytest.mark.parametrize("name", GRIDS)
def test_each_step_loses_less(name: str) -> None:
    weight, hessian = problem(1)
    grid = GRIDS[name]
    plain = loss(nearest(weight, hessian, grid, GROUP, search=False), weight, hessian)
    made = [
        loss(how.rounded(weight, hessian, grid, GROUP), weight, hessian)
        for how in (Gptq(), Gptq(act_order=True), Gptq(act_order=True, search=True))
    ]
    assert made[0] < 0.7 * plain
    assert made[1] < 0.9 * made[0]
    assert made[2] < 0.7 * plain  # ranges are searched for each group alone, so not below the others


def test_nearest_without_a_search_is_the_formats_own() -> None:
    weight, hessian = problem(2)
    made = nearest(weight, hessian, Int4Grid(), GROUP, search=False)
    for one, due in zip(made.tensors().values(), quantize(weight, group_size=GROUP).tensors().values(), strict=True):
        assert one.equal(due)


def test_the_search_finds_the_range_of_least_error() -> None:
    weight, hessian = problem(3)
    importance = hessian.diagonal().view(1, -1, GROUP)

    def weighted(made: Any) -> Tensor:
        return ((dequantize(made) - weight).unflatten(1, (-1, GROUP)).square() * importance).sum(2)

    searched, whole = (nearest(weight, hessian, Int4Grid(), GROUP, search=one) for one in (True, False))
    assert bool((weighted(searched) <= weighted(whole)).all())
    assert weighted(searched).sum() < 0.95 * weighted(whole).sum()


def test_groups_of_a_whole_row_and_of_a_few_columns() -> None:
    weight, hessian = problem(4)
    for group in (K, 96, 32):
        made = Gptq().rounded(weight, hessian, Int4Grid(), group)
        assert list(made.scale.shape) == [N, K // group]
        assert loss(made, weight, hessian) < loss(quantize(weight, group_size=group), weight, hessian)


def test_inputs_that_are_always_zero() -> None:
    weight, hessian = problem(5)
    hessian[10:20], hessian[:, 10:20] = 0, 0
    for act_order in (False, True):
        made = Gptq(act_order=act_order).rounded(weight, hessian, Int8Grid(), GROUP)
        close = (dequantize(made) - weight)[:, 10:20].abs() <= made.scale[:, :1].float() * 0.51
        assert bool(close.all())  # rounded to the nearest: nothing is made up for there
    silent = Gptq().rounded(weight, torch.zeros_like(hessian), Int4Grid(), GROUP)
    assert dequantize(silent).equal(dequantize(quantize(weight, group_size=GROUP)))


def test_fewer_tokens_than_inputs() -> None:
    """The hessian has no inverse, and damping makes it one."""
    weight, _ = problem(6)
    inputs = torch.randn(8, K, generator=torch.Generator().manual_seed(0))
    made = Gptq(act_order=True).rounded(weight, inputs.t() @ inputs / 8, Int4Grid(), GROUP)
    assert bool(dequantize(made).isfinite().all())


@pytest.mark.parametrize(
    "spoilt, words",
    [
        ("weight", r"weight\[0, 3\] is nan"),
        ("hessian", "the hessian is not finite"),
        ("shape", r"the hessian is \[64, 64\], and \[192, 192\] belongs"),
        ("indefinite", "no inverse, even with a damping of 1"),
        ("group", "group_size 50 does not divide K = 192"),
    ],
)
def test_what_cannot_be_rounded(spoilt: str, words: str) -> None:
    weight, hessian = problem(7)
    group = 50 if spoilt == "group" else GROUP
    if spoilt == "weight":
        weight[0, 3] = float("nan")
    elif spoilt == "hessian":
        hessian[1, 2] = float("inf")
    elif spoilt == "shape":
        hessian = hessian[:64, :64]
    elif spoilt == "indefinite":
        hessian = hessian - 100 * torch.eye(K) * hessian.diagonal().max()
        hessian.diagonal().abs_()
        hessian[0, 1] = hessian[1, 0] = 1e9
    with pytest.raises(KernelError, match=words):
        Gptq().rounded(weight, hessian, Int4Grid(), group)


def test_two_matrices_of_doubles_exist_at_a_time() -> None:
    x = torch.randn(400, 128)
    hessian = x.T @ x
    order = hessian.diagonal().argsort(descending=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        inverse_factor(hessian, 0.01, order)
    results: Any = profile.profiler
    events = [one for one in results.kineto_results.events() if one.name() == "[memory]"]
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    assert 8 * 128**2 < max(accumulate(sizes)) < 2.1 * 8 * 128**2


def test_hessians_are_shared_where_the_input_is() -> None:
    x, z = torch.randn(2, 5, 8), torch.randn(3, 8)
    held = Hessians()
    for _ in range(2):
        for path in ("q", "k"):
            held.see(path, x)
        held.see("o", z)
    held.see("nothing", z[:0])
    assert held.shared() == [["q", "k"], ["o"]]
    rows = x.reshape(-1, 8)
    q, o = held.of("q"), held.of("o")
    assert q is not None
    assert o is not None
    torch.testing.assert_close(q, rows.t() @ rows / 10)
    torch.testing.assert_close(o, z.t() @ z / 3)
    assert held.of("nothing") is None
    z[1, 4] = float("nan")
    held.see("o", z)
    with pytest.raises(KernelError, match="o: channel 4 of its input is NaN"):
        held.of("o")


def test_an_input_that_was_written_into_is_another() -> None:
    x = torch.ones(4, 8)
    held = Hessians()
    held.see("q", x)
    held.see("k", x.mul_(2))
    assert held.shared() == [["q"], ["k"]]
    k = held.of("k")
    assert k is not None
    assert float(k[0, 0]) == 4
