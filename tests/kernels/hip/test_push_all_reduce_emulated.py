"""The one-shot all-reduce without a device: the ranks are blocks of one launch of the SIMT emulator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.hip.binding import check
from accelpatch.kernels.hip.collective.binding import (
    DTYPES,
    MOST_BLOCKS,
    MOST_BYTES,
    MOST_RANKS,
    NAME,
    VECTOR,
    VECTORS,
    PushArgs,
    Ranks,
    declared,
    memory_bytes,
)
from tests.kernels.hip.simt_emulator import COMPILER, compiled

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]
BLOCK = VECTOR * VECTORS  # bytes
Library = Callable[[str], ctypes.CDLL]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    @functools.cache
    def made(form: str) -> ctypes.CDLL:
        held = compiled(form, ["ranks.cpp", "collective/push_all_reduce.hip"], NAME, tmp_path_factory)
        held.set_emulator(4, 1, 0)
        held.set_beside(1)
        return held

    return made


class Job:
    """The memory of all ranks."""

    def __init__(self, library: ctypes.CDLL, world: int):
        self.library, self.world = library, world
        self.memory = [torch.full((memory_bytes(world),), 255, dtype=torch.uint8) for _ in range(world)]
        at = [one.data_ptr() for one in self.memory]
        self.ranks = [
            Ranks(rank, at, torch.zeros(MOST_BLOCKS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
            for rank in range(world)
        ]

    def summed(
        self, rounds: Sequence[Sequence[Tensor]], residual: Tensor | None = None, patience: int = 0
    ) -> list[list[Tensor]]:
        """Each round's y of each rank, of each round's x of each rank; all rounds in one emulated launch."""
        made = [[torch.full_like(x, float("nan")) for x in every] for every in rounds]
        launches = [
            one.arguments(x, residual, y, patience)
            for every, outputs in zip(rounds, made, strict=True)
            for one, x, y in zip(self.ranks, every, outputs, strict=True)
        ]
        blocks = max(-(-every[0].nbytes // BLOCK) for every in rounds)
        array = (PushArgs * len(launches))(*launches)
        dtype = DTYPES.index(rounds[0][0].dtype)
        assert self.library.run_ranks(array, len(rounds), self.world, blocks, dtype) == 0
        return made


def drawn(world: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size).to(dtype) for _ in range(world)]


def in_order(parts: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
    """The sum in float32 in the ranks' order, rounded once."""
    total = functools.reduce(torch.add, [one.float() for one in parts])
    return (total if residual is None else total + residual.float()).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("form", ["nvidia", "gfx942"])
def test_messages_of_any_sizes_follow_each_other(form: str, world: int, dtype: torch.dtype, library: Library) -> None:
    torch.manual_seed(0)
    job, values = Job(library(form), world), VECTOR // dtype.itemsize
    sizes = [values * n for n in (1, VECTORS, VECTORS + 7, 2 * VECTORS, 5, 2 * VECTORS - 1, 3, VECTORS + 1)]
    rounds = [drawn(world, size, dtype) for size in sizes]
    for every, found in zip(rounds, job.summed(rounds), strict=True):
        for one in found:
            assert torch.equal(one, in_order(every))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backwards", [0, 1], ids=["forwards", "backwards"])
@pytest.mark.parametrize("seed", range(3))
def test_what_comes_late_is_waited_for(seed: int, backwards: int, world: int, library: Library) -> None:
    """Stores of one rank are there much later than those of the others, word by word, which runs ahead meanwhile."""
    torch.manual_seed(seed)
    held = library("nvidia")
    job, residual = Job(held, world), torch.randn(8 * VECTORS + 24).bfloat16()
    rounds = [drawn(world, len(residual), torch.bfloat16) for _ in range(9)]
    try:
        held.set_emulator(4, 1, backwards)
        held.set_delay(20, seed)
        made = job.summed(rounds, residual)
    finally:
        held.set_delay(0, 0)
        held.set_emulator(4, 1, 0)
    for every, found in zip(rounds, made, strict=True):
        for one in found:
            assert torch.equal(one, in_order(every, residual))


def test_a_message_that_looks_like_nothing_yet(library: Library) -> None:
    """NaNs whose bits are those of a word that has not come: they come as NaNs, and nobody waits for ever."""
    job, x = Job(library("nvidia"), 2), torch.arange(16.0).bfloat16()
    odd = x.clone()
    odd.view(torch.int16)[2:5] = -1
    for one in job.summed([[x, odd], [odd, x], [x, x], [x, x]])[0]:
        assert one[2:5].isnan().all()
        assert torch.equal(one[5:], 2 * x[5:])
    assert not any(one.failed for one in job.ranks)


def test_every_word_is_reset_two_launches_later(library: Library) -> None:
    """After launches that have nothing in a place, the slots of those before are as at first."""
    job, x = Job(library("nvidia"), 2), torch.ones(8).bfloat16()
    job.summed([[x, x]] * 5)
    for memory, source in zip(job.memory, (1, 0), strict=True):
        held = memory.view(3, 2, MOST_BYTES)[:, :, :VECTOR]
        written = [(slot, rank) for slot in range(3) for rank in range(2) if bool((held[slot, rank] != 255).any())]
        assert written == [(1, source)]  # the fifth's


def test_a_rank_that_never_comes(library: Library) -> None:
    """With patience the launch ends and says so."""
    held, x, y = library("nvidia"), torch.ones(8).bfloat16(), torch.empty(8).bfloat16()
    job = Job(held, 2)
    args = job.ranks[0].arguments(x, None, y, 50)
    check(declared(held)(ctypes.byref(args), 0, None), NAME)
    assert int(job.ranks[0].failed) == 1


@pytest.mark.parametrize("changes", [
    {"world": 1}, {"world": MOST_RANKS + 1}, {"rank": 2}, {"rank": -1}, {"vectors": 0}, {"patience": -1},
    {"vectors": MOST_BYTES // VECTOR + 1}, {"x": None}, {"y": 8}, {"residual": 8}, {"slot_numbers": None}, {"failed": None},
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_not_launched(changes: dict[str, int], library: Library) -> None:
    held, x, y = library("nvidia"), torch.ones(8).bfloat16(), torch.empty(8).bfloat16()
    job = Job(held, 2)
    args = job.ranks[0].arguments(x, None, y, 1)
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(KernelError, match="was not launched"):
        check(declared(held)(ctypes.byref(args), 0, None), NAME)
