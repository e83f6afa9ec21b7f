"""Measured orders of attention's implementations: kept by device, found by the nearest length, damaged files named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accelpatch import cache
from accelpatch import device as devices
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.ops.attention import stored as attention_stored
from accelpatch.kernels.ops.attention.stored import Order, orders_of, preferred, store
from accelpatch.kernels.spec import Spec

CPU = devices.probe("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    orders_of.cache_clear()
    yield tmp_path / "cache"
    orders_of.cache_clear()


def spec(length: int, size: int = 64, causal: bool = True, dtype: torch.dtype = torch.float32) -> Spec:
    return flash_attention.of_shape(4, 4, size, dtype, length=length, keys=length, causal=causal)


def order(length: int, *names: str, size: int = 64, causal: bool = True) -> Order:
    return Order("float32", size, length, causal, names)


def test_the_nearest_length_of_the_same_kind_decides() -> None:
    store(CPU, [order(512, "eager", "sdpa"), order(4096, "sdpa", "eager"), order(512, "sdpa", causal=False)])
    assert preferred(spec(300), CPU) == ("eager", "sdpa")
    assert preferred(spec(1400), CPU) == ("eager", "sdpa")
    assert preferred(spec(1600), CPU) == ("sdpa", "eager")
    assert preferred(spec(512, causal=False), CPU) == ("sdpa",)
    assert preferred(spec(512, size=128), CPU) == ()
    assert preferred(spec(512, dtype=torch.bfloat16), CPU) == ()
    assert preferred(spec(1), CPU) == ()  # of a decode step nothing was measured


def test_a_choice_goes_by_what_was_measured_and_ends_with_the_rest() -> None:
    assert dispatch.choose(flash_attention.OP, spec(512), CPU) == "sdpa"
    store(CPU, [order(512, "eager", "one_of_a_later_release")])
    assert dispatch.order(flash_attention.OP, spec(512), CPU) == ("eager", "cpu", "sdpa")
    assert dispatch.choose(flash_attention.OP, spec(512), CPU) == "eager"


def test_calls_that_were_chosen_before_are_chosen_anew() -> None:
    q = torch.randn(1, 4, 512, 64)
    flash_attention.flash_attention(q, q, q, None, None, None, True, 0, 0.0, 0.1)
    store(CPU, [order(512, "eager")])
    ran = dispatch.calls["flash_attention", "eager"]
    flash_attention.flash_attention(q, q, q, None, None, None, True, 0, 0.0, 0.1)
    assert dispatch.calls["flash_attention", "eager"] == ran + 1
    dispatch.forget()


def test_a_second_measurement_takes_the_place_of_the_first() -> None:
    store(CPU, [order(512, "eager"), order(512, "eager", size=128)])
    store(CPU, [order(2048, "sdpa")])
    assert [(one.size, one.length) for one in orders_of(CPU)] == [(128, 512), (64, 2048)]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"dtype": "float32"}]', '[{"names": 3}]', "null"])
def test_a_damaged_file_is_named(text: str) -> None:
    path = store(CPU, [order(512, "eager")])
    path.write_text(text)
    orders_of.cache_clear()
    with pytest.raises(KernelError, match=r"orders\.json is damaged .* run `accelpatch tune attention` again"):
        preferred(spec(512), CPU)
    store(CPU, [order(512, "sdpa")])  # what the message says to do
    assert preferred(spec(512), CPU) == ("sdpa",)
    path.write_text(text)
    cache.clear(attention_stored.KIND)
    orders_of.cache_clear()
    assert preferred(spec(512), CPU) == ()


def test_without_a_folder_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "file" / "below"))
    assert preferred(spec(512), CPU) == ()
