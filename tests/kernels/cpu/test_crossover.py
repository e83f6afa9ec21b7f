"""The choice between torch's product and the native one: by measurement, kept, and never a reason to fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch import cache
from accelpatch.device import probe
from accelpatch.kernels import build, cpu_crossover, cpu_native, cpu_pack, packed_linear
from accelpatch.kernels.cpu_crossover import NEVER, ROWS
from accelpatch.kernels.cpu_pack import Pack
from accelpatch.quant import int4, int8

reason = build.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cpu_native.native()  # from the cache that has it
    cpu_crossover._rows.cache_clear()
    folder = tmp_path / "cache"
    monkeypatch.setenv("ACCELPATCH_CACHE", str(folder))
    yield folder
    cpu_crossover._rows.cache_clear()


def at_once(x: Tensor, pack: Pack) -> Tensor:
    return x


def slow(x: Tensor, pack: Pack) -> Tensor:
    time.sleep(0.05)
    return x


def fast_when_many(x: Tensor, pack: Pack) -> Tensor:
    return x if x.shape[0] > 20 else slow(x, pack)


@pytest.mark.parametrize(
    ("product", "due"), [(at_once, ROWS[0]), (slow, NEVER), (fast_when_many, ROWS[1])], ids=["fast", "slow", "many"]
)
@pytest.mark.parametrize("kind", [cpu_native.INT8, cpu_native.INT4], ids=["int8", "int4"])
def test_the_faster_one_is_found(kind: int, product: Any, due: int) -> None:
    assert cpu_crossover.measure(kind, 64, product) == due


def test_it_is_measured_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_crossover.rows(cpu_native.INT8, 64, at_once) == ROWS[0]
    (kept,) = [entry for entry in cache.listing() if entry.kind == cpu_crossover.KIND]
    assert json.loads((kept.path / cpu_crossover.FILE).read_text()) == {"rows": ROWS[0]}
    cpu_crossover._rows.cache_clear()
    monkeypatch.setattr(cpu_crossover, "measure", None)  # a second process measures nothing
    assert cpu_crossover.rows(cpu_native.INT8, 64, at_once) == ROWS[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": null}', '{"rows": "x"}'])
def test_a_damaged_entry_costs_a_measurement(content: str) -> None:
    cpu_crossover.rows(cpu_native.INT8, 64, at_once)
    (kept,) = [entry for entry in cache.listing() if entry.kind == cpu_crossover.KIND]
    (kept.path / cpu_crossover.FILE).write_text(content)
    cpu_crossover._rows.cache_clear()
    assert cpu_crossover.rows(cpu_native.INT8, 64, at_once) == ROWS[0]


def test_a_cache_that_cannot_be_used_costs_a_measurement(own_cache: Path) -> None:
    own_cache.symlink_to(own_cache.parent)
    assert cpu_crossover.rows(cpu_native.INT8, 64, at_once) == ROWS[0]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_both_products_give_the_same_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x, bias = (torch.randn(size, generator=generator) for size in ((70, 128), (20, 128), (70,)))
    weight = int8.quantize(w, group_size=64) if kind == "int8" else int4.quantize(w, group_size=64)
    pack = cpu_pack.pack_int8(*weight[:2]) if kind == "int8" else cpu_pack.pack_int4(*weight)
    results = []
    for rows in (NEVER, 1):
        monkeypatch.setattr(cpu_crossover, "rows", lambda kind, group, product, rows=rows: rows)
        results.append(packed_linear.packed_linear(x, *packed_linear.arguments(pack, bias)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not torch.equal(*results)  # they are two products
