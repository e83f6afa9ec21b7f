"""Tensor parallel on the GPUs of one machine: peer memory, all-reduces in a captured loop, tokens a second.

    python scripts/bench.py tensor_parallel [--ranks 2] [--cases peer all_reduce 7b-exact 7b-int4 70b-int4]
        [--batch 1] [--new 128] [--repeats 3] [--tiny]

`peer` answers first whether the GPUs can read each other's memory, and whether torch's symmetric memory works over it.
`all_reduce` times sums of 8 KB to 1 MB, 64 of them in one graph, by NCCL (RCCL) and by the one-shot kernel of
symmetric memory, without NVLink multicast. The others time greedy generate() of a Llama shape with random weights on
one rank and on `--ranks`; the second must give every rank the same tokens, else the exit status is 1. `70b` has half of
its 80 layers, so that one GPU holds it in bfloat16 before it is patched; twice its time a token is that of the whole.
`--tiny` runs a tiny model by gloo on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch
from accelpatch.parallel import launch
from accelpatch.parallel.group import joined
from scripts.benchmarks.engines import by_tokens
from scripts.benchmarks.harness import ROOT, TINY, Option, Table, cases

SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 40, "num_attention_heads": 64,
            "num_key_value_heads": 8},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 512},
}  # fmt: skip
CASES = ["peer", "all_reduce", "7b-exact", "7b-int4", "70b-int4"]
SIZES = (8 << 10, 32 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20)  # bytes
IN_A_GRAPH = 64
OPTIONS = (
    cases(CASES, "What is measured.", [*CASES, "70b-exact", "tiny-exact", "tiny-int4"]),
    Option("ranks", 2, "Ranks, each on a GPU of its own."), Option("batch", 1, "Sequences of a call of generate()."),
    Option("new", 128, "New tokens of a call."), Option("repeats", 3, "Timed calls, of which the median counts."),
    Option("child", "", "The folder for a rank's figures; this program starts its ranks with it."), TINY,
)  # fmt: skip


def peer() -> list[dict[str, Any]]:
    """Whether each pair of GPUs can read each other's memory, and whether symmetric memory works."""
    found = [
        {"question": f"can cuda:{one} read cuda:{other}", "answer": str(torch.cuda.can_device_access_peer(one, other))}
        for one in range(dist.get_world_size()) for other in range(dist.get_world_size()) if one != other
    ]  # fmt: skip
    summed = _one_shot(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
    return [*found, {"question": "one-shot all-reduce over symmetric memory", "answer": _answer(summed)}]


def _answer(summed: Any) -> str:
    if isinstance(summed, str):
        return summed
    right = bool((summed() == dist.get_world_size()).all())
    torch.cuda.synchronize()
    return "works" if right else "gives a wrong sum"


def _one_shot(x: torch.Tensor) -> Any:
    """A function that sums x by the one-shot kernel, or why there is none."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        held = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(held, group)
        held.copy_(x)
        return lambda: torch.ops.symm_mem.one_shot_all_reduce(held, "sum", group)
    except (ImportError, AttributeError, RuntimeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def all_reduce() -> list[dict[str, Any]]:
    """Microseconds of a sum over all ranks, by size and way."""
    rows = []
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        ways: dict[str, Any] = {"nccl": lambda x=x: dist.all_reduce(x), "one-shot": _one_shot(x)}
        row: dict[str, Any] = {"KB": size >> 10}
        for name, way in ways.items():
            row[f"{name}, us"] = None if isinstance(way, str) else _captured(way)
        rows.append(row)
    return rows


def _captured(way: Any) -> float:
    """Microseconds of one call among IN_A_GRAPH of a graph: the median of 20 replays."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(IN_A_GRAPH):
            way()
    taken = []
    for _ in range(23):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end) / IN_A_GRAPH)
    return sorted(taken[3:])[10]


def generated(case: str, asked: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Tokens a second of a shape and a recipe, `shape-recipe`, on this rank; its tokens too."""
    shape, recipe = case.split("-")
    device = torch.device("cpu" if asked.tiny else "cuda")
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=False)
    torch.set_default_dtype(torch.float32 if asked.tiny else torch.bfloat16)
    with device:
        model: Any = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    start = time.perf_counter()
    accelpatch.patch(model, recipe, keep_original="none", verify="quick", parallel="tp" if ranks > 1 else None)
    seconds = time.perf_counter() - start
    ids = torch.randint(5, config.vocab_size, (asked.batch, 32), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    row = by_tokens(model, ids, asked.new, asked.repeats)
    tokens = model.generate(**batch, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, 32:].tolist()
    return row | {"patch, s": seconds, "tokens": tokens}


def child(asked: argparse.Namespace) -> None:
    """One rank: its figures go to a file."""
    found: dict[str, Any] = {}
    group = joined() if asked.ranks > 1 else None
    for case in asked.cases:
        measure: Any = {"peer": peer, "all_reduce": all_reduce}.get(case)
        if measure is None:
            found[case] = generated(case, asked, asked.ranks)
        elif group is not None and not asked.tiny:
            found[case] = measure()
    rank = 0 if group is None else group.rank
    (Path(asked.child) / f"{asked.ranks}.{rank}.json").write_text(json.dumps(found))


def started(asked: argparse.Namespace, ranks: int, folder: str, wanted: list[str]) -> list[dict[str, Any]]:
    """What each rank found, of a job of so many."""
    words = [sys.executable, str(ROOT / "scripts/bench.py"), "tensor_parallel", "--child", folder, "--cases", *wanted]
    for name in ("batch", "new", "repeats"):
        words += [f"--{name}", str(getattr(asked, name))]
    words += ["--ranks", str(ranks), *(["--tiny"] if asked.tiny else [])]
    launch.run(words, ranks, {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "PYTHONPATH": str(ROOT)})
    return [json.loads((Path(folder) / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row a case and number of ranks. Exit status 1 where ranks have different tokens."""
    if asked.child:
        child(asked)
        return {}
    shapes = [case for case in asked.cases if "-" in case]
    rates = Table("Tokens a second of greedy generate()")
    found: dict[str, Any] = {}
    good = True
    with tempfile.TemporaryDirectory() as folder:
        every = started(asked, asked.ranks, folder, asked.cases)
        for case in (one for one in asked.cases if one in every[0] and one not in shapes):
            found[case] = every[0][case]
            printed = Table(case)
            for row in found[case]:
                printed.add(row)
        alone = started(asked, 1, folder, shapes)[0] if shapes else {}
    for case in shapes:
        same = _same(every, case)
        good &= same
        one, many = alone[case], every[0][case]
        for ranks, row in ((1, one), (asked.ranks, many)):
            said = {"tokens": "the same on all ranks" if same else "DIFFER"} if ranks > 1 else {"tokens": ""}
            times = {"times one": row["tok/s"] / one["tok/s"]}
            rates.add({"case": case, "batch": asked.batch, "ranks": ranks} | row | times | said)
    asked.status = int(not good)
    return found | {"rows": rates.rows}


def _same(every: list[dict[str, Any]], case: str) -> bool:
    """Whether all ranks made the same tokens."""
    return all(one[case]["tokens"] == every[0][case]["tokens"] for one in every)
