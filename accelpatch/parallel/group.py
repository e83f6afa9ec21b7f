"""The ranks of a tensor-parallel job: what they add up, gather and agree on.

Activations go through torch.distributed (NCCL or RCCL on a GPU, gloo on a CPU) and may be captured in a graph. All else
(are the ranks alike, what is over its bound) goes through the job's store, where a rank that is gone is noticed.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelpatch.errors import KernelError, PatchError
from accelpatch.parallel import peer_memory
from accelpatch.parallel.peer_memory import PeerMemory
from accelpatch.parallel.push_memory import PushMemory
from accelpatch.parallel.watchdog import STALE, Watchdog

MOST = timedelta(minutes=10)  # that a collective may wait for a rank that still gives signs
_GROUPS: list[Group] = []
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class _Unavailable(Exception):
    """A way over peer memory that one rank cannot take, by its reason."""


class Group:
    """All ranks of the job. rank: this one's. device: that of its shard, None for where the model lies."""

    def __init__(self) -> None:
        self.rank, self.world, self.backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        self.device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in self.backend else None
        self.peers: PeerMemory | None = None
        store: Any = dist.distributed_c10d._get_default_store()
        prefixed: Any = vars(dist)["PrefixStore"]
        self._store = prefixed("accelpatch/exchange", store)
        apart = store.clone() if hasattr(store, "clone") else store
        self.watchdog = Watchdog(prefixed("accelpatch/watchdog", apart), self.rank, self.world)
        self._attempt, self._exchanges = 0, 0
        self.sum_by(os.environ.get(peer_memory.ASKED, ""))

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    @property
    def by(self) -> str:
        """By what activations are added up, for reports."""
        kind = {peer_memory.ONE_SHOT: "one-shot", peer_memory.PUSH: "one-shot push"}
        if self.peers is not None:
            return f"{self.backend}, up to {peer_memory.MOST >> 10} KB {kind[self.peers.way]} over peer memory"
        return f"{self.backend}, for all sizes: {self._why_not}" if self._why_not else self.backend

    def sum_by(self, asked: str) -> None:
        """From here on add up small messages by `asked`: "nccl" as all others, "one_shot" or "push" over peer memory,
        "" by the first of these that every rank can.

        Raises PatchError, on every rank, where one of them cannot do what is asked; NCCL adds up then.
        """
        self.peers, self._why_not = None, ""
        for way in peer_memory.to_try(asked, self.device):
            try:
                self.peers = self._over_peer_memory(way)
                return
            except _Unavailable as error:
                if asked:
                    raise PatchError(
                        f"{peer_memory.ASKED}={way} cannot run here ({error}): unset it, and NCCL takes its place"
                    ) from error
                self._why_not = str(error)

    def _over_peer_memory(self, way: str) -> PeerMemory:
        kind = PushMemory if way == peer_memory.PUSH else PeerMemory
        peers: PeerMemory = self._all_can(lambda: kind(self.device, dist.group.WORLD))
        self._all_can(peers.share)
        self._all_can(lambda: peers.check(self.rank, self.world))
        return peers

    def _all_can(self, step: Callable[[], Any]) -> Any:
        """What a step gave, which every rank takes. Raises _Unavailable, on every rank, where one could not."""
        made, why = None, None
        try:
            made = step()
        except (ImportError, AttributeError, RuntimeError, KernelError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
        if (why := self.agreed(why)) is not None:
            raise _Unavailable(why)
        return made

    def all_reduce_(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum of x over all ranks, plus residual; the sum may be written into x."""
        if self.peers is not None and self.peers.takes(x):
            return self.peers.summed(x, residual)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise self._named(error) from error
        return x if residual is None else residual + x

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """[..., sum of sizes] of x[..., sizes[rank]], on every rank the same."""
        most, last = max(sizes), x.shape[-1]
        mine = x if last == most else torch.nn.functional.pad(x, (0, most - last))
        gathered = mine.new_empty(self.world, *mine.shape)
        try:
            _all_gather(gathered.view(-1), mine.contiguous().view(-1))
        except RuntimeError as error:
            raise self._named(error) from error
        return torch.cat([one[..., :size] for one, size in zip(gathered.unbind(), sizes, strict=True)], dim=-1)

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank gave, in their order. Raises PatchError, with its name, where one of them is gone."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        try:
            keys = [f"{self._attempt}/{number}/{rank}" for rank in range(self.world)]
            self._store.set(keys[self.rank], pickle.dumps(mine))
            found = [pickle.loads(self._taken(key)) for key in keys]
            if number > 1:  # which every rank has read: each was in the exchange after it
                self._store.delete_key(f"{self._attempt}/{number - 2}/{self.rank}")
        except RuntimeError as error:
            raise self._named(error) from error
        return found

    def _taken(self, key: str) -> bytes:
        until, pause = time.monotonic() + MOST.total_seconds(), 1e-4
        while not self._store.check([key]):
            if (lost := self.watchdog.gone()) is not None and not self._store.check([key]):
                raise PatchError(lost)
            if time.monotonic() > until:
                raise PatchError(f"rank {key.rpartition('/')[2]} did not come within {MOST}")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return bytes(self._store.get(key))

    def check_alike(self, facts: dict[str, Any]) -> None:
        """Raise PatchError where the ranks' facts (name for messages -> value) differ."""
        every = self.exchange(facts)
        for name, first in every[0].items():
            for rank, others in enumerate(every):
                if others.get(name) != first:
                    raise PatchError(
                        f"the ranks differ: {name} is {_short(first)} on rank 0 and {_short(others.get(name))} on rank "
                        f"{rank}; start all of them with the same program and arguments"
                    )

    def agreed(self, reason: str | None) -> str | None:
        """The first rank's reason, if any has one."""
        every = self.exchange(reason)
        first = next((rank for rank, one in enumerate(every) if one is not None), None)
        if first is None:
            return None
        return reason if first == self.rank else f"on rank {first}, {every[first]}"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager: something that all ranks do together; where one fails, the others get the reason."""
        self._attempt, self._exchanges = self._attempt + 1, 0
        with self.watchdog.attempt():
            yield

    def _named(self, error: RuntimeError) -> PatchError:
        lost = self.watchdog.gone(within=STALE + 2)
        return PatchError(lost or f"the ranks lost each other: {(str(error).splitlines() or [''])[0]}")


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def joined() -> Group:
    """The group of the job that this process is a rank of. Raises PatchError where it is none."""
    if _GROUPS and dist.is_initialized():
        return _GROUPS[0]
    _GROUPS.clear()
    if not dist.is_available():
        raise PatchError("this torch was built without torch.distributed: install one with it for parallel='tp'")
    if not dist.is_initialized():
        if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise PatchError(
                f"parallel='tp' is for a job of several processes, and {missing[0]} is not set: start the program by "
                "`torchrun --nproc-per-node 2 program.py`, or call torch.distributed.init_process_group first"
            )
        _initialise()
    _GROUPS.append(Group())
    return _GROUPS[0]


def _initialise() -> None:
    """Join the job, on a GPU by NCCL (of ROCm's torch: RCCL), else by gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=MOST)
        return
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if local >= torch.cuda.device_count():
        raise PatchError(
            f"rank {os.environ['RANK']} is the {local + 1}th of this machine, which has {torch.cuda.device_count()} "
            "GPUs: start at most that many ranks here"
        )
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", timeout=MOST, device_id=torch.device("cuda", local))
