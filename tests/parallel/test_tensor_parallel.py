"""Tensor parallel: a model split among ranks beside the whole one, in jobs of two and four ranks by gloo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accelpatch.errors import ArgumentError, PatchError
from accelpatch.in_memory import patch
from accelpatch.parallel.split import heads_of, parts, unit_of
from tests.support import ranks
from tests.support.rank_jobs import FAMILIES, FUSED, RECIPES, REFUSED
from tests.support.tiny import CAUSAL

JOBS = (
    ("families", 2), ("recipes", 2), ("fused", 2), ("four", 4), ("sampled", 2), ("refused", 2), ("too_many", 4),
    ("peer_memory", 2), ("no_peers", 2), ("no_room", 2), ("adapters", 2), ("reading", 2),
    ("killed", 2), ("raising", 2), ("failing", 2),
)  # fmt: skip
SLACK = 2e-6  # of logits in float32, relative to the largest: another order of additions in two layers


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ranks.Ended]:
    return ranks.run(tmp_path_factory.mktemp("ranks"), JOBS)


def assert_like_the_whole(every: list[Any], name: str, slack: float = SLACK) -> None:
    """One model of a job's results: near the whole one's logits, its tokens, and bit for bit the same on each rank."""
    found = [one[name] for one in every]
    assert found[0]["apart"] < slack
    assert found[0]["tokens"] == found[0]["due"]
    assert all(one["bits"] == found[0]["bits"] and one["tokens"] == found[0]["tokens"] for one in found)
    assert not any(one["failed"] for one in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(ended: dict[str, ranks.Ended], name: str) -> None:
    assert ended["families"].statuses == [0, 0], ended["families"].errors
    assert_like_the_whole(ended["families"].results, name)


@pytest.mark.nightly
def test_every_family(tmp_path: Path) -> None:
    job = ranks.run(tmp_path, [("every_family", 2)])["every_family"]
    assert job.statuses == [0, 0], job.errors
    for name in job.results[0]:
        assert_like_the_whole(job.results, name)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(ended: dict[str, ranks.Ended], name: str) -> None:
    """Rounded groups are those of one rank; scales a row are of each rank's columns, and finer."""
    every = ended["recipes"].results
    assert ended["recipes"].statuses == [0, 0], ended["recipes"].errors
    if name in ("smoothquant", "fp8"):
        found = [one[name] for one in every]
        assert found[0]["bits"] == found[1]["bits"]
        assert found[0]["tokens"] == found[1]["tokens"]
        assert found[0]["verified"].kl < 0.05
        assert not found[0]["failed"]
    else:
        assert_like_the_whole(every, name)
    said = every[1][name]["report"]
    assert "tensor parallel: rank 1 of 2 (gloo) has " in said
    assert "query heads 2 to 3, key heads 1 to 1, inner columns 64 to 95" in said
    assert "the native step does not add up between the ranks" in said


@pytest.mark.parametrize("name", [*FUSED, "int4", "mixtral", "drafts"])
def test_fused_layers_and_captured_steps(ended: dict[str, ranks.Ended], name: str) -> None:
    assert ended["fused"].statuses == [0, 0], ended["fused"].errors
    assert_like_the_whole(ended["fused"].results, name)
    paths = ended["fused"].results[0][name]["paths"]
    assert paths["fused layers"] > 0
    assert not any("modules" in path or "stock" in path for path in paths)
    if name == "drafts":
        assert any("draft" in path for path in paths), paths


def test_four_ranks_with_copies_of_key_heads(ended: dict[str, ranks.Ended]) -> None:
    assert ended["four"].statuses == [0] * 4, ended["four"].errors
    every = ended["four"].results
    assert_like_the_whole(every, "exact")
    for one, place in zip(every, (0, 0, 1, 1), strict=True):
        assert f"key heads {place} to {place}," in one["exact"]["report"]
    rounded = [one["int4"] for one in every]
    assert len({one["bits"] for one in rounded}) == 1
    assert "a multiple of none of the group sizes [128, 64, 32] (on another rank)" in rounded[0]["report"]


@pytest.mark.nightly
def test_eight_ranks(tmp_path: Path) -> None:
    ended = ranks.run(tmp_path, [("eight", 8)])["eight"]
    assert ended.statuses == [0] * 8, ended.errors
    assert_like_the_whole(ended.results, "exact")
    assert_like_the_whole(ended.results, "int8")
    for rank, one in enumerate(ended.results):
        assert f"key heads {rank // 2} to {rank // 2}," in one["exact"]["report"]


def test_sampling_is_that_of_rank_0(ended: dict[str, ranks.Ended]) -> None:
    first, second = ended["sampled"].results
    assert first["ranks"] == second["ranks"] == first["whole"]
    assert first["ranks"][0] != first["ranks"][1]


def test_refusals(ended: dict[str, ranks.Ended]) -> None:
    assert ended["refused"].statuses == [0, 0], ended["refused"].errors
    first, second = ended["refused"].results
    for name in REFUSED:
        assert first[name] == second[name]
        assert "split among" in first[name]
    assert "the ranks differ: the recipe's name is int4 on rank 0 and int8 on rank 1; start all" in first["recipe"]
    assert "the ranks differ: the configuration's intermediate_size is 96 on rank 0 and 128 on" in first["model"]
    assert "rank 1 failed: " in first["failed"]
    assert "/nowhere" in second["failed"]
    assert "is split among the ranks already" in first["twice"]
    assert "the ranks differ: the prompt (by its digest) is " in first["prompt"]
    assert "save it in one process" in first["save"]
    assert "is not trained" in first["gradient"]
    for one in (first, second):
        assert one["whole"]
        assert not one["hooks"]
        assert one["tokens"] == one["unpatched"] == one["whole tokens"]


def test_an_all_reduce_that_cannot_run_is_refused(ended: dict[str, ranks.Ended]) -> None:
    for first, second in ended["peer_memory"].results:
        assert "ACCELPATCH_ALL_REDUCE=one_shot needs GPUs, and this job computes on the CPU" in first
        assert "ACCELPATCH_ALL_REDUCE is 'fast'; it is nccl, one_shot or push" in second


def test_without_peer_access_on_one_rank_all_refuse_and_add_up_as_before(ended: dict[str, ranks.Ended]) -> None:
    assert ended["no_peers"].statuses == [0, 0], ended["no_peers"].errors
    for rank, (access, wrong, by, total) in enumerate(ended["no_peers"].results):
        where = "" if rank else "on rank 1, "
        assert f"one_shot cannot run here ({where}no access between these devices): unset it, and NCCL" in access
        assert "a sum through peer memory was wrong" in wrong
        assert re.fullmatch("gloo, for all sizes: (on rank 0, )?a sum through peer memory was wrong", by[0])
        assert by[1] == "gloo, up to 256 KB one-shot over peer memory"
        assert total == [3.0] * 3


def test_a_gpu_with_less_memory_or_in_use(ended: dict[str, ranks.Ended]) -> None:
    assert ended["no_room"].statuses == [0, 0], ended["no_room"].errors
    first, second = ended["no_room"].results
    due = "meta has 2.0 kB free of 85.9 GB, and its part of the model takes "
    assert f"cannot be split among 2 ranks: on rank 1, {due}" in first[0]
    assert f"cannot be split among 2 ranks: {due}" in second[0]
    assert first[1]
    assert second[1]
    assert first[2] == second[2]


def test_adapters_are_refused_and_an_assistant_drafts(ended: dict[str, ranks.Ended]) -> None:
    assert ended["adapters"].statuses == [0, 0], ended["adapters"].errors
    for one in ended["adapters"].results:
        assert "adapters: merge them before" in one["before"]
        assert "adapters on a model that is split among ranks would compute with parts of theirs" in one["after"]
        assert one["assisted"] == one["due"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="it reads /proc/self/smaps")
def test_a_rank_reads_its_part_of_a_checkpoint(ended: dict[str, ranks.Ended]) -> None:
    """Of o and down, whose rows are cut, pages are read whole; nothing is read before the split."""
    assert ended["reading"].statuses == [0, 0], ended["reading"].errors
    for one in ended["reading"].results:
        assert one["size"] > 60 << 20
        assert one["loaded"] < 0.1 * one["size"]
        assert one["read"] < 0.85 * one["size"]
        assert one["own"] < 0.8 * one["size"]
    assert ended["reading"].results[0]["tokens"] == ended["reading"].results[1]["tokens"]


def test_a_world_that_no_dimension_allows(ended: dict[str, ranks.Ended]) -> None:
    due = "3 query heads with 3 key and value heads cannot be split among 4 ranks: take up to 3 ranks"
    assert all(due in one for one in ended["too_many"].results)


@pytest.mark.parametrize(
    ("name", "due"),
    [
        ("killed", "rank 1 has ended: its process is gone"),
        ("raising", "rank 1 has ended: ValueError: of the user's own code"),
    ],
    ids=["killed", "raising"],
)
def test_a_rank_that_dies(ended: dict[str, ranks.Ended], name: str, due: str) -> None:
    job = ended[name]
    assert job.seconds < 30
    assert due in f"{job.results[0]} {job.errors[0]}", job


def test_a_patch_that_fails_on_one_rank(ended: dict[str, ranks.Ended]) -> None:
    job = ended["failing"]
    assert job.seconds < 30
    assert job.statuses == [1, 0]
    assert "rank 0 ends: rank 1 failed: " in job.errors[0]
    assert job.results[1] == "lives"


@pytest.mark.nightly
def test_a_rank_that_is_stopped_while_the_device_is_waited_for(tmp_path: Path) -> None:
    job = ranks.run(tmp_path, [("stuck", 2)])["stuck"]
    assert job.seconds < 30
    assert job.statuses == [1, -9]
    assert "rank 0 ends: rank 1 has ended or is stuck" in job.errors[0]


def test_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PatchError, match="RANK is not set: start the program by `torchrun"):
        patch(CAUSAL["llama"].make(), "exact", parallel="tp")
    with pytest.raises(ArgumentError, match="parallel is 'pp'"):
        patch(CAUSAL["llama"].make(), "exact", parallel="pp")


def test_parts_are_whole_groups() -> None:
    assert [len(part) // 128 for part in parts(11008, unit_of(11008, 4), 4)] == [22, 22, 21, 21]
    assert parts(96, unit_of(96, 2), 2) == [range(64), range(64, 96)]
    assert unit_of(96, 2, [48]) == 48


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world", "due"),
    [
        (32, 32, 2, [(0, 16, 0, 16), (16, 32, 16, 32)]),
        (9, 3, 2, [(0, 6, 0, 2), (6, 9, 2, 3)]),
        (8, 2, 4, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]),
        (3, 1, 2, [(0, 2, 0, 1), (2, 3, 0, 1)]),
    ],
    ids=["divide", "uneven", "copies", "copies-uneven"],
)
def test_heads(heads: int, kv_heads: int, world: int, due: list[tuple[int, ...]]) -> None:
    found = heads_of(heads, kv_heads, world)
    assert [(one.query.start, one.query.stop, one.kv.start, one.kv.stop) for one in found] == due
