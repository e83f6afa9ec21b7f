"""A profile of a model of Llama-2-7B's shape on a GPU: the figures that the docs promise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch import api
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import once
from accelpatch.profiling import roofline as rooflines
from accelpatch.profiling.page import page
from accelpatch.profiling.recorder import recording
from accelpatch.profiling.run import Profile, record

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPE = Shape(1, 32, 16)


@pytest.fixture(scope="module")
def profiles() -> Iterator[dict[str, Any]]:
    """The profiles of the original and of the patched model, and the seconds that both took."""
    model = api.random_model("llama2-7b", dtype="bfloat16", device=torch.device("cuda"))
    begin = time.perf_counter()
    original = record(model, SHAPE)
    accelpatch.patch(model, "int8", keep_original="none", verify=False)
    patched = record(model, SHAPE)
    yield {"original": original, "patched": patched, "seconds": time.perf_counter() - begin, "model": model}
    del model
    torch.cuda.empty_cache()


def test_recording_costs_at_most_a_twentieth_of_an_eager_run(profiles: dict[str, Any]) -> None:
    found = profiles["original"].summary
    print(f"eager: {found.unprofiled:.0f} us a step, {found.recorded:.0f} while recorded ({found.cost:+.1%})")
    assert found.cost <= 0.05


def test_regions_alone_cost_little(profiles: dict[str, Any]) -> None:
    """Without torch's profiler: what hooks and marks add to an eager generate()."""
    model = api.random_model("smollm2-135m", dtype="bfloat16", device=torch.device("cuda"))
    ids = prompt_ids(1000, SHAPE).cuda()
    device = ids.device
    generate(model, ids, 32)
    plain, marked = list[float](), list[float]()
    for _ in range(5):
        plain.append(once(lambda: generate(model, ids, 32), device))
        with recording(model, 32, by_profiler=False):
            marked.append(once(lambda: generate(model, ids, 32), device))
    print(f"marks: {min(marked) / min(plain) - 1:+.1%}")
    assert min(marked) <= 1.05 * min(plain)


def test_the_union_of_the_kernels_is_the_captured_step(profiles: dict[str, Any]) -> None:
    found = profiles["patched"].summary
    print(f"captured: {found.unprofiled:.0f} us a step, {found.recorded:.0f} recorded, {found.busy:.0f} busy, "
          f"{found.waited:.0f} waited")  # fmt: skip
    assert found.busy >= 0.97 * found.recorded
    assert found.launches < 10


@pytest.mark.parametrize("side", ["original", "patched"])
def test_kernels_have_names(profiles: dict[str, Any], side: str) -> None:
    profile: Profile = profiles[side]
    print(f"{side}: {profile.summary.named:.1%} of {profile.summary.kernels:.0f} kernels named")
    assert profile.summary.named >= 0.95
    layers = [row.name for row in profile.summary.by_layer if row.name.startswith("layer ")]
    assert layers[:32] == [f"layer {place}" for place in range(32)]
    if side == "patched":
        assert any(row.name.startswith("fused_linear ") for row in profile.summary.by_operation)


def test_a_profile_takes_less_than_two_minutes(profiles: dict[str, Any]) -> None:
    print(f"both profiles: {profiles['seconds']:.0f} s")
    assert profiles["seconds"] < 120


def test_the_page_is_small(profiles: dict[str, Any]) -> None:
    sides = [(name, profiles[name].summary) for name in ("original", "patched")]
    assert len(page("llama2-7b", "random weights", sides).encode()) < 2_000_000


def test_the_roofline_of_the_step(profiles: dict[str, Any]) -> None:
    """The bytes of the operations are those of the plan, and linear layers are near the read limit."""
    device = torch.device("cuda")
    most = rooflines.peak(torch.bfloat16, device)
    found = rooflines.roofline(profiles["patched"], read_limit(device), most, torch.bfloat16)
    print(rooflines.text(found))
    read = sum(one.bytes for one in found.points)
    planned = profiles["model"].accelpatch.report().token_bytes[1]
    assert read == pytest.approx(planned, rel=0.1)
    linear = [one for one in found.points if one.operation.startswith("fused_linear ")]
    share = sum(one.bytes for one in linear) / sum(one.microseconds for one in linear) * 1e6 / found.read_limit
    print(f"linear layers: {share:.0%} of the read limit")
    assert 0.5 < share < 1.15  # a kernel prefetches weights while the one before it still runs
