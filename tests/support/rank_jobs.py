"""The jobs of tests/parallel/test_tensor_parallel.py: each function runs on every rank."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.kernels.cpu import native_library
from accelpatch.parallel.group import joined
from accelpatch.recipe.recipe import parse
from accelpatch.runtime.graphs import capture
from tests.support.fake_peers import FakePeers
from tests.support.own_memory import anonymous, mapped
from tests.support.planned import PLANNED, PLANS, planned, with_plan
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL, EXPERTS, padded_batch

warnings.simplefilter("ignore")
GROUPS = "extends: {}\nrules:\n  - name: linear\n    options: {{group_size: {}}}\n"
#: groups that no rank's part cuts, so that all ranks together round as one does
RECIPES: dict[str, Any] = {
    "exact": "exact",
    "int8": parse(GROUPS.format("int8", 16)),
    "int4": parse(GROUPS.format("int4", 32)),
    "smoothquant": "smoothquant",
    "fp8": "fp8",
}
FAMILIES = ("llama", "gemma2", "granite", "phi3", "gpt_neox", "gpt2", "cohere", "opt", "mixtral")
REFUSED = ("olmo2", "bloom", "falcon")
FUSED = ("llama", "gemma2", "phi3", "granite", "cohere")


def by_plan(rank: int, world: int) -> Any:
    """Models that are split by their tp_plan; what is refused, with the model whole again."""
    found: dict[str, Any] = {name: compared(name, "exact") for name in PLANNED}
    found["int8"] = compared("SeedOss", RECIPES["int8"], verify=False)
    whole = planned("SeedOss")
    before = [(name, one.data_ptr()) for name, one in whole.named_parameters()]
    found |= {case: _error(with_plan(whole, changes), "exact") for case, changes in PLANS.items()}
    return found | {"whole": before == [(name, one.data_ptr()) for name, one in whole.named_parameters()]}


def warm() -> None:
    """Import all that jobs need, before ranks are forked."""
    model, *_ = [CAUSAL[name].make() for name in FAMILIES]
    greedy(model)
    accelpatch.patch(model, "exact", progress=False, verify=False)
    for name in ("group", "launch", "reductions", "shards", "tensor_parallel", "watchdog"):
        importlib.import_module(f"accelpatch.parallel.{name}")


def tp(model: nn.Module, recipe: Any, **options: Any) -> Any:
    return accelpatch.patch(model, recipe, parallel="tp", progress=False, **options)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    batch = padded_batch()
    found: Tensor = model(**batch).logits[batch["attention_mask"].bool()]
    return found


def greedy(model: Any, rows: int = 3, **options: Any) -> list[list[int]]:
    batch = {name: one[:rows] for name, one in padded_batch().items()}
    made: Tensor = model.generate(**batch, max_new_tokens=8, **{"do_sample": False} | options)
    found: list[list[int]] = made.tolist()
    return found


def compared(
    name: str, recipe: Any, rows: int = 3, shape: dict[str, int] | None = None, **options: Any
) -> dict[str, Any]:
    """A split model beside the whole one, both patched: relative difference of logits, and the tokens of some rows."""
    whole: Any = planned(name) if name in PLANNED else (CAUSAL.get(name) or EXPERTS[name]).make(**shape or {})
    parted = copy.deepcopy(whole)
    accelpatch.patch(whole, recipe, progress=False, verify=False)
    tp(parted, recipe, **options)
    due, found = logits(whole), logits(parted)
    report = parted.accelpatch.report()
    return {
        "apart": float((found - due).abs().max() / due.abs().max()), "bits": found.numpy().tobytes(),
        "tokens": greedy(parted, rows), "due": greedy(whole, rows), "paths": dict(report.paths),
        "failed": [site.path for site in report.sites if site.failed], "report": str(report),
        "verified": report.verification,
    }  # fmt: skip


def families(rank: int, world: int) -> Any:
    return {name: compared(name, "exact", verify=name == "mixtral") for name in FAMILIES}


def every_family(rank: int, world: int) -> Any:
    return {name: compared(name, "exact") for name in CAUSAL if name not in (*REFUSED, "gptj", "gpt_bigcode")}


def recipes(rank: int, world: int) -> Any:
    return {name: compared("llama", recipe) for name, recipe in RECIPES.items()}


def fused(rank: int, world: int) -> Any:
    cast(Any, capture.GRAPHS)["cpu"] = capture.EagerGraph
    cast(Any, native_library).why_not = lambda device: "not in this test"
    with_tiles(pytest.MonkeyPatch())
    found = {name: compared(name, "exact") for name in FUSED}
    changed = parse(GROUPS.format("int4", 32) + "  - name: head\n    options: {group_size: null}\n")
    found["int4"] = compared("llama", changed, verify=False)
    found["mixtral"] = compared("mixtral", parse(GROUPS.format("int4", 32)), verify=False)
    speculating = parse("extends: exact\nruntime: {speculate: prompt_lookup}\n")
    return found | {"drafts": compared("llama", speculating, verify=False, rows=1)}


def four(rank: int, world: int) -> Any:
    """Four ranks, two key heads: each of them on two ranks; 96 inner columns are three groups of 32, cut in 16s."""
    return {"exact": compared("llama", "exact"), "int4": compared("llama", "int4", verify="quick")}


def eight(rank: int, world: int) -> Any:
    """Eight ranks, four key heads: each of them on two ranks; 352 inner columns are 11 groups of 32, or 44 for each."""
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
    return {name: compared("llama", RECIPES[name], shape=shape, verify=False) for name in ("exact", "int8")}


def sampled(rank: int, world: int) -> Any:
    model = tp(CAUSAL["llama"].make(), "exact", verify=False)
    torch.manual_seed(1000 + rank)
    found = [greedy(model, do_sample=True, temperature=3.0) for _ in range(2)]
    whole = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False, progress=False)
    torch.manual_seed(1000)
    return {"ranks": found, "whole": [greedy(whole, do_sample=True, temperature=3.0) for _ in range(2)]}


def refused(rank: int, world: int) -> Any:
    """What is refused, with the model whole again, and the same job going on after it."""
    found: dict[str, Any] = {name: _error(CAUSAL[name].make(), "exact") for name in REFUSED}
    model: Any = CAUSAL["llama"].make()
    before = [(name, one.data_ptr()) for name, one in model.named_parameters()]
    found["recipe"] = _error(model, "int8" if rank else "int4")
    found["model"] = _error(CAUSAL["llama"].make(intermediate_size=96 + 32 * rank), "exact")
    found["failed"] = _error(model, "smoothquant", statistics="/nowhere" if rank else None)
    found["whole"] = before == [(name, one.data_ptr()) for name, one in model.named_parameters()]
    found["hooks"] = [name for name, one in model.named_modules() if one._forward_hooks or one._forward_pre_hooks]
    tp(model, "exact", verify=False)
    found["tokens"] = greedy(model)
    found["prompt"] = _said(lambda: model.generate(torch.tensor([[5, 6 + rank]]), max_new_tokens=2))
    found["save"] = _said(lambda: model.save_pretrained("/nowhere"))
    found["gradient"] = _said(lambda: model(**padded_batch()).logits.sum().backward())
    accelpatch.unpatch(model)
    found["unpatched"], found["twice"] = greedy(model), _error(model, "exact")
    found["whole tokens"] = greedy(CAUSAL["llama"].make())
    return found


def peer_memory(rank: int, world: int) -> Any:
    os.environ["ACCELPATCH_ALL_REDUCE"] = "one_shot"
    found = _error(CAUSAL["llama"].make(), "exact")
    os.environ["ACCELPATCH_ALL_REDUCE"] = "fast"
    return found, _error(CAUSAL["llama"].make(), "exact")


def no_peers(rank: int, world: int) -> Any:
    """Peer memory that one rank has not, and that adds up wrongly: all refuse, and go on as before.

    Where no way is asked for and one rank cannot push: torch's kernel takes its place where it adds up rightly.
    """
    group, found = joined(), []
    group.device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patched:
        for sums in (True, False):
            made = FakePeers("no access between these devices" if sums and rank else None, 0.0 if rank else 5.0)
            patched.setattr("accelpatch.parallel.group.PeerMemory", lambda device, group, made=made: made)
            found.append(_said(lambda: group.sum_by("one_shot")))
        patched.setattr("accelpatch.parallel.group.PushMemory", lambda device, group: FakePeers("no nvcc" * rank, 0.0))
        by = []
        for made in (FakePeers(None, 5.0), FakePeers(None, None)):
            patched.setattr("accelpatch.parallel.group.PeerMemory", lambda device, group, made=made: made)
            group.sum_by("")
            by.append(group.by)
    group.device, group.peers = None, None
    x = torch.full((3,), rank + 1.0)
    return [*found, by, group.all_reduce_(x).tolist()]


def no_room(rank: int, world: int) -> Any:
    """A rank whose GPU has less memory, or is in use: all refuse, and the model is whole again."""
    group, model = joined(), CAUSAL["llama"].make()
    group.device = torch.device("meta")  # on which nothing of the model lies
    before = [(name, one.data_ptr()) for name, one in model.named_parameters()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("accelpatch.parallel.room.free_of", lambda device: (2048 if rank else 1 << 30, 80 << 30))
        said = _error(model, "exact")
    group.device = None
    whole = before == [(name, one.data_ptr()) for name, one in model.named_parameters()]
    tp(model, "exact", verify=False)
    return said, whole, greedy(model)


def adapters(rank: int, world: int) -> Any:
    """LoRA is refused before a split and after it; an assistant that is whole drafts for a split model."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    found = {"before": _error(peft.get_peft_model(CAUSAL["llama"].make(), config), "exact")}
    model: Any = tp(CAUSAL["llama"].make(), "exact", verify=False)
    found["due"] = str(greedy(model, rows=1))
    assistant = CAUSAL["llama"].make()
    found["assisted"] = str(greedy(model, rows=1, assistant_model=assistant))
    found["after"] = _said(lambda: greedy(peft.get_peft_model(model, config), rows=1))
    return found


def reading(rank: int, world: int) -> Any:
    """Bytes of a checkpoint's file that each rank has read, of its mapping; bytes in all; the tokens of both."""
    group = joined()
    folder = group.exchange(tempfile.mkdtemp() if rank == 0 else None)[0]
    if rank == 0:
        shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
        CAUSAL["llama"].make(**cast(Any, shape), num_hidden_layers=1, head_dim=128).save_pretrained(folder)
    group.exchange(None)
    size = sum(one.stat().st_size for one in Path(folder).glob("*.safetensors"))
    before = anonymous()
    from accelpatch.models import load

    model: Any = load.load(folder).model
    loaded = mapped(folder)
    tp(model, "exact", verify=False, keep_original="none")
    found = {"size": size, "loaded": loaded, "read": mapped(folder), "own": anonymous() - before}
    group.exchange(None)
    if rank == 0:
        shutil.rmtree(folder)
    return found | {"tokens": greedy(model, rows=1)}


def too_many(rank: int, world: int) -> Any:
    return _error(CAUSAL["llama"].make(num_attention_heads=3, num_key_value_heads=3, hidden_size=48), "exact")


def _error(model: nn.Module, recipe: Any, **options: Any) -> str:
    return _said(lambda: tp(model, recipe, **options))


def _said(call: Any) -> str:
    try:
        call()
    except accelpatch.AccelpatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def killed(rank: int, world: int) -> Any:
    """A rank is gone while the others wait for it in a collective."""
    model = tp(CAUSAL["llama"].make(), "exact", verify=False)
    if rank == 1:
        os._exit(7)
    return _said(lambda: greedy(model))


def raising(rank: int, world: int) -> Any:
    """A rank's own program fails."""
    model = tp(CAUSAL["llama"].make(), "exact", verify=False)
    if rank == 1:
        raise ValueError("of the user's own code")
    return _said(lambda: greedy(model))


def failing(rank: int, world: int) -> Any:
    """The patch fails on one rank, and its program lives on while the other waits for it in a collective."""
    if not rank:
        return _error(CAUSAL["llama"].make(), "exact")
    with pytest.raises(ValueError, match="input_ids"):
        tp(CAUSAL["llama"].make(), "exact", inputs=[{"nonsense": 1}])
    time.sleep(8)
    return "lives"


def stuck(rank: int, world: int) -> Any:
    """A rank that is stopped gives no sign."""
    model = tp(CAUSAL["llama"].make(), "exact", verify=False)
    if rank == 1:
        os.kill(os.getpid(), 19)
    time.sleep(60)  # as in a kernel that spins on the device
    print(model, file=sys.stderr)
