"""The ranks of tests/parallel/test_tensor_parallel_gpu.py: python -m tests.support.gpu_rank_jobs JOB FOLDER."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import accelpatch
from accelpatch.parallel.group import joined
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.rank_jobs import GROUPS
from tests.support.tiny import CAUSAL, EXPERTS, padded_batch

CASES: dict[str, tuple[str, Any]] = {
    "llama": ("llama", "exact"), "gemma2": ("gemma2", "exact"), "phi3": ("phi3", "exact"),
    "mixtral": ("mixtral", "exact"), "int8": ("llama", parse(GROUPS.format("int8", 16))),
    "int4": ("llama", parse(GROUPS.format("int4", 32))),
}  # fmt: skip
WAYS = ("nccl", "one_shot", "push")
NEW = 16


def compared(name: str, recipe: Any) -> dict[str, Any]:
    """A split model beside the whole one, float32, both patched on the GPU; how steps of it ran."""
    device = torch.device("cuda", torch.cuda.current_device())
    parted: Any = (CAUSAL.get(name) or EXPERTS[name]).make()
    whole = accelpatch.patch(copy.deepcopy(parted).to(device), recipe, verify=False, progress=False)
    accelpatch.patch(parted, recipe, verify=False, progress=False, parallel="tp")
    batch = {key: value.to(device) for key, value in padded_batch().items()}
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        due, found = (model(**batch).logits[kept] for model in (whole, parted))
    tokens = [_greedy(model, batch) for model in (parted, parted, whole)]
    return {
        "apart": float((found - due).abs().max() / due.abs().max()), "bits": found.cpu().numpy().tobytes(),
        "tokens": tokens[0], "again": tokens[1], "due": tokens[2], "paths": dict(parted.accelpatch.report().paths),
        "captured": parted.accelpatch.report().paths.get(CAPTURED, 0), "report": str(parted.accelpatch.report()),
    }  # fmt: skip


def _greedy(model: Any, batch: dict[str, Tensor]) -> list[list[int]]:
    found: list[list[int]] = model.generate(**batch, max_new_tokens=NEW, do_sample=False).tolist()
    return found


def alike() -> dict[str, Any]:
    """Every case by every way; the reason of a way that cannot be."""
    group, found = joined(), dict[str, Any]()
    for way in WAYS:
        try:
            group.sum_by(way)
        except accelpatch.AccelpatchError as error:
            found[way] = str(error)
            continue
        found[way] = {case: compared(*given) for case, given in CASES.items()}
    return found


def killed() -> dict[str, Any]:
    """The last rank is gone while the first waits for it on its device."""
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False, progress=False, parallel="tp")
    batch = {key: value.to(model.device) for key, value in padded_batch().items()}
    _greedy(model, batch)
    if joined().rank:
        os._exit(7)
    _greedy(model, batch)
    return {}


if __name__ == "__main__":
    result = {"alike": alike, "killed": killed}[sys.argv[1]]()
    Path(sys.argv[2], os.environ["RANK"]).write_bytes(pickle.dumps(result))
