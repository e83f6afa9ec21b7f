"""Two processes that train adapters of one patched model each, by DistributedDataParallel or FSDP2 over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import accelpatch
from tests.support.lora import RECIPES, config, peft
from tests.support.tiny import CAUSAL, VOCABULARY

RANKS = 2


def batch(rank: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))


def model_of(recipe: Any) -> Any:
    model = accelpatch.patch(CAUSAL["llama"].make(), RECIPES.get(recipe, recipe), verify=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config()).train()


def step(model: Any, *batches: torch.Tensor) -> dict[str, torch.Tensor]:
    """The adapters after one step of gradient descent on the mean of the batches' losses."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for ids in batches:
        (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
    optimizer.step()
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {name: whole(one.detach()).clone() for name, one in inner.named_parameters() if one.requires_grad}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(model: Any) -> Any:
    """By FSDP2: the floats of each layer on its own, then the rest. Packed weights are no parameters and stay whole."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": sharded}


def work(rank: int, folder: str, recipe: str, way: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    torch.save(step(WAYS[way](model_of(recipe)), batch(rank)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.nightly if way == "ddp" else ()) for way in WAYS])
def test_two_ranks_learn_what_one_learns_of_both_batches(way: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path), "train", way), RANKS)
    due = step(model_of("train"), *(batch(rank) for rank in range(RANKS)))
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == due.keys()
        for name, one in found.items():
            torch.testing.assert_close(one, due[name], rtol=1e-3, atol=1e-5)
