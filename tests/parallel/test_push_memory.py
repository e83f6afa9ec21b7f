"""Peer memory for the one-shot push: what is refused before a kernel runs, and what a launch is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.hip.collective import binding
from accelpatch.parallel import push_memory
from accelpatch.parallel.push_memory import PATIENCE, PushMemory

CPU = torch.device("cpu")


class Launches:
    """In the place of the binding's launch: what each call was given; gives (ranks' sum of `launch`) plus residual."""

    def __init__(self, factor: float = 3.0, fails: bool = False):
        self.factor, self.fails, self.given = factor, fails, list[tuple[Any, Tensor | None, int]]()

    def __call__(self, ranks: Any, x: Tensor, residual: Tensor | None = None, *, patience: int = 0) -> Tensor:
        self.given.append((ranks, residual, patience))
        if self.fails:
            ranks.failed.fill_(1)
        y = self.factor * x
        return y if residual is None else y + residual


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(binding, "launch", made)
    monkeypatch.setattr(push_memory.libraries, "library", lambda name, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def memory(monkeypatch: pytest.MonkeyPatch, world: int = 2, offset: int = 0, elsewhere: int = 0) -> PushMemory:
    """Rank 1's, on the CPU. elsewhere: bytes between its memory and the address that torch gives."""
    import torch.distributed._symmetric_memory as symmetric

    def rendezvous(tensor: Tensor, group: Any) -> Any:
        own = tensor.data_ptr() - offset + elsewhere
        return SimpleNamespace(rank=1, buffer_ptrs=[4096, own, *range(8192, 8190 + world)][:world], offset=offset)

    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    return PushMemory(CPU, SimpleNamespace(size=lambda: world))


@pytest.mark.parametrize("offset", [0, 256])
def test_a_launch_has_the_addresses_of_all_ranks(
    offset: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = memory(monkeypatch, offset=offset)
    made.share()
    made.check(0, 2)
    x, residual = torch.ones(2, 8), torch.ones(2, 8)
    assert made.summed(x, residual).tolist() == [[4.0] * 8] * 2
    ranks, beside, patience = launches.given[-1]
    assert beside is residual
    assert patience == 0
    assert {one for _, _, one in launches.given[:-1]} == {PATIENCE}
    assert ranks.rank == 1
    assert ranks.memory[0] == 4096 + offset
    assert bool((made._bytes == 255).all())
    assert ranks.memory[1] == made._bytes.data_ptr()
    assert made._bytes.nbytes == binding.memory_bytes(2)
    assert not bool(ranks.slot_numbers.any())


@pytest.mark.parametrize("residual", [
    torch.ones(8, 2).t(), torch.ones(2, 8, dtype=torch.float64), torch.ones(8), torch.ones(17)[1:].view(2, 8),
], ids=["strided", "dtype", "broadcast", "unaligned"])  # fmt: skip
def test_a_residual_that_the_kernel_cannot_add(
    residual: Tensor, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = memory(monkeypatch)
    made.share()
    assert made.summed(torch.ones(2, 8), residual).tolist() == [[4.0] * 8] * 2
    assert launches.given[-1][1] is None


def test_what_cannot_be(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="up to 8 ranks, and these are 9"):
        memory(monkeypatch, world=9)
    with pytest.raises(RuntimeError, match="no addresses that kernels can use"):
        memory(monkeypatch, elsewhere=16).share()
    made = memory(monkeypatch)
    made.share()
    launches.factor = 2.0
    with pytest.raises(RuntimeError, match="a sum through peer memory was wrong"):
        made.check(0, 2)
    launches.fails = True
    with pytest.raises(RuntimeError, match="writes into this one's memory does not come"):
        made.check(0, 2)
