"""Statistics of inputs against a plain computation; and what is kept while they are gathered."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.quant.calibration import PERCENTILE, ROWS, ChannelStatistics, Collector, Statistics

BATCHES = [torch.randn(2, length, 12, generator=torch.Generator().manual_seed(length)) for length in (700, 500, 3)]


def collected(batches: list[Tensor], path: str = "a.b") -> ChannelStatistics:
    collector = Collector()
    for batch in batches:
        collector.see(path, batch)
    return collector.finish()[path]


def test_figures_are_those_of_all_tokens() -> None:
    found, flat = collected(BATCHES), torch.cat([batch.flatten(0, 1) for batch in BATCHES])
    assert found.absmax.equal(flat.abs().amax(0))
    torch.testing.assert_close(found.mean_square, flat.double().square().mean(0).float(), rtol=1e-5, atol=0)
    due, tokens = torch.zeros(12, dtype=torch.float64), 0
    for batch in BATCHES:
        rows = batch.flatten(0, 1).abs().double().sort(0).values
        due += rows[max(1, round(PERCENTILE * len(rows))) - 1] * len(rows)
        tokens += len(rows)
    torch.testing.assert_close(found.percentile, (due / tokens).float(), rtol=1e-5, atol=0)
    assert bool((found.percentile < found.absmax).any())
    given = {tuple(row) for row in flat.bfloat16().tolist()}
    assert found.rows.shape == (ROWS, 12)
    assert {tuple(row) for row in found.rows.tolist()} <= given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_seen_as_float32(dtype: torch.dtype) -> None:
    found = collected([batch.to(dtype) for batch in BATCHES])
    assert found.absmax.equal(torch.cat([batch.flatten(0, 1) for batch in BATCHES]).to(dtype).float().abs().amax(0))
    assert {getattr(found, name).dtype for name in ("absmax", "percentile", "mean_square")} == {torch.float32}


VIEWS: dict[str, Any] = {
    "one-token": lambda x: x[:, :1],
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.transpose(0, 1),
    "flat": lambda x: x.flatten(0, 1),
    "needs-a-gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in VIEWS.items()])
def test_views(view: Any) -> None:
    x = view(BATCHES[1])
    found = collected([x])
    assert found.absmax.equal(x.detach().reshape(-1, 12).abs().amax(0))
    assert not found.absmax.requires_grad
    assert not found.rows.requires_grad


def test_no_tokens_are_no_site() -> None:
    collector = Collector()
    collector.see("a", torch.empty(0, 4))
    assert collector.finish() == {}


def test_one_tensor_is_looked_at_once_and_another_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.quant import calibration

    made = []
    figures = calibration._figures
    monkeypatch.setattr(calibration, "_figures", lambda x: made.append(x) or figures(x))
    collector, x = Collector(), torch.randn(5, 4)
    for path in ("q", "k", "v"):
        collector.see(path, x)
    assert len(made) == 1
    first = x.clone()
    x.mul_(3)  # the same tensor with other values
    collector.see("o", x)
    collector.see("up", x.clone())
    assert len(made) == 3
    found = collector.finish()
    assert all(found[path].absmax.equal(first.abs().amax(0)) for path in ("q", "k", "v"))
    assert found["o"].absmax.equal(x.abs().amax(0))
    for one, other in (("q", "k"), ("k", "v"), ("o", "up")):
        names = [name for name in vars(found[one]) if name != "output_absmax"]
        assert all(getattr(found[one], name).equal(getattr(found[other], name)) for name in names)


def test_nothing_of_an_input_is_kept_but_some_rows() -> None:
    collector, alive = Collector(), []
    for at in range(6):
        x = torch.randn(400, 8)
        alive.append(weakref.ref(x))
        collector.see("a", x)
        collector.see("b", x)
        del x
        gc.collect()
        assert sum(one() is not None for one in alive) <= 1, at  # the latest one, for the next site that reads it
    rows = collector._sums["a"].rows
    assert sum(map(len, rows)) <= 6 * ROWS
    assert all(row.untyped_storage().nbytes() <= ROWS * 8 * 4 for row in rows)
    found = collector.finish()["a"]
    assert len(found.rows) == ROWS
    gc.collect()
    assert [one() for one in alive] == [None] * 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("batch", [0, 2], ids=["first-batch", "last-batch"])
def test_what_is_not_finite_is_named(value: float, batch: int) -> None:
    batches = [one.clone() for one in BATCHES]
    batches[batch][1, 2, 7] = value
    with pytest.raises(KernelError, match=r"^a\.b: channel 7 of its input is NaN or infinite"):
        collected(batches)


def good(k: int = 4) -> dict[str, Tensor]:
    figures = {name: torch.rand(k) for name in ("absmax", "percentile", "mean_square")}
    return figures | {"rows": torch.randn(3, k).bfloat16()}


BAD: dict[str, dict[str, Tensor]] = {
    "nan": {"absmax": torch.tensor([1, float("nan"), 1, 1])},
    "infinite": {"mean_square": torch.tensor([1, float("inf"), 1, 1])},
    "negative": {"percentile": torch.tensor([1, -1e-9, 1, 1])},
    "another-length": {"absmax": torch.rand(5)},
    "another-dtype": {"absmax": torch.rand(4).double()},
    "two-dimensions": {name: torch.rand(2, 2) for name in ("absmax", "percentile", "mean_square")},
    "no-dimension": {name: torch.tensor(1.0) for name in ("absmax", "percentile", "mean_square")},
    "rows-of-another-length": {"rows": torch.randn(3, 5).bfloat16()},
    "rows-of-another-dtype": {"rows": torch.randn(3, 4)},
    "one-row": {"rows": torch.randn(4).bfloat16()},
    "rows-with-nan": {"rows": torch.full((3, 4), float("nan")).bfloat16()},
}


@pytest.mark.parametrize("changes", [pytest.param(changes, id=name) for name, changes in BAD.items()])
def test_figures_that_cannot_be(changes: dict[str, Tensor]) -> None:
    assert ChannelStatistics(**good()).absmax.shape == (4,)
    with pytest.raises(KernelError, match="of an input"):
        ChannelStatistics(**good() | changes)


def test_a_site_without_statistics_and_one_of_another_size() -> None:
    statistics = Statistics({"a": ChannelStatistics(**good())}, "", 3)
    assert statistics.of("a", 4) is statistics.sites["a"]
    with pytest.raises(KernelError, match="nothing of b: no token reached it"):
        statistics.of("b", 4)
    with pytest.raises(KernelError, match="of a are of 4 channels, and it has 5"):
        statistics.of("a", 5)
