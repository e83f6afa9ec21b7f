"""The factors of smoothing: their formula, channels that grouped queries read, the search, static errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.quant.calibration import ChannelStatistics
from accelpatch.quant.smoothing import Channels, SiteStatistics, factors, output_error, searched
from accelpatch.replacers.w8a8 import MOST_STATIC_ERROR


def statistics_of(x: Tensor) -> ChannelStatistics:
    size = x.abs().amax(0)
    return ChannelStatistics(size, size, x.square().mean(0), x[:32].bfloat16())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.65, 1.0], ids=str)
def test_the_formula(alpha: float) -> None:
    x, w = torch.tensor([0.5, 100.0, 3.0]), torch.tensor([2.0, 0.1, 3.0])
    torch.testing.assert_close(factors(x, w, alpha), x**alpha / w ** (1 - alpha))


def test_a_dead_channel_stays() -> None:
    found = factors(torch.tensor([0.0, 5, 0, 1e-30]), torch.tensor([3.0, 0, 0, 1e-30]), 0.5)
    assert found[:3].tolist() == [1, 1, 1]
    assert bool(found.isfinite().all())
    assert bool((found > 0).all())


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan"), float("inf")], ids=str)
def test_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(KernelError, match="alpha is"):
        factors(torch.ones(2), torch.ones(2), alpha)


def test_grouped_queries_read_one_channel_several_times() -> None:
    channels = Channels("all", 2)  # 2 heads of keys and values, 6 of queries
    of_input = torch.arange(12.0)
    assert channels.of_input(of_input, 4).tolist() == [4, 5, 10, 11]
    back = channels.to_input(torch.tensor([1.0, 2, 3, 4]), 12)
    assert back.tolist() == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    assert channels.of_input(back, 4).tolist() == [1, 2, 3, 4]
    assert channels.of_input(of_input, 12) is of_input


PLACES = {
    "all": (Channels(), 4, 4, [0, 1, 2, 3]),
    "gate_up": (Channels("second half"), 6, 3, [3, 4, 5]),
    "qkv": (Channels("values", 2), 12, 4, [8, 9, 10, 11]),
    "qkv-grouped": (Channels("values", 2), 8, 4, [6, 7]),
    "qkv-by-head": (Channels("values by head", 2), 12, 4, [4, 5, 10, 11]),
}


@pytest.mark.parametrize("channels, n, k, due", [pytest.param(*case, id=name) for name, case in PLACES.items()])
def test_rows_that_make_the_channels(channels: Channels, n: int, k: int, due: list[int]) -> None:
    assert channels.places(n, k).tolist() == due


def test_the_search_takes_the_least_error() -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 24, generator=generator), torch.randn(16, 24, generator=generator)
    x[:, 5] *= 80
    inputs, pair = statistics_of(x), (x.abs().amax(0), w.abs().amax(0))
    found = searched(Channels(), [inputs], [w], pair)
    errors = {alpha: output_error(inputs, w, factors(*pair, alpha)) for alpha in (0.3, 0.5, 0.65, 0.8, 0.95)}
    least = output_error(inputs, w, found)
    assert least <= min(errors.values())
    assert least < output_error(inputs, w, torch.ones(24)) / 20


def test_the_search_leaves_alone_what_needs_no_smoothing() -> None:
    w = torch.ones(4, 8)
    x = torch.ones(40, 8)  # exact in int8 as it is
    assert searched(Channels(), [statistics_of(x)], [w], (x[0], w[0])).equal(torch.ones(8))


def test_the_error_of_a_static_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4096, 64, generator=generator)
    massive = normal.clone()
    massive[7, 3] = 1000
    for x, holds in ((normal, True), (massive, False)):
        scale = x.abs().max() / 127
        measured = ((x / scale).round() * scale - x).square().mean().sqrt() / x.square().mean().sqrt()
        found = SiteStatistics(statistics_of(x))
        if holds:
            assert found.static_error == pytest.approx(float(measured), rel=0.05)
        assert (found.static_error <= MOST_STATIC_ERROR) == holds
    assert SiteStatistics().static_error == float("inf")
    assert SiteStatistics(statistics_of(torch.zeros(40, 4))).static_error == 0
    factors_of = massive.abs().amax(0)
    assert SiteStatistics(statistics_of(massive), factors_of).absmax.tolist() == pytest.approx([1.0] * 64)  # type: ignore[union-attr]
