"""Tensor parallel on the GPUs of one machine: peer memory, all-reduces in a captured loop, tokens a second.

`peer` answers first whether the GPUs can read each other's memory, and whether torch's symmetric memory works over it.
`all_reduce` times sums of 8 KB to 1 MB, 64 of them in one graph, by NCCL (RCCL) and by the one-shot kernel of
symmetric memory, without NVLink multicast. The others time greedy generate() of a Llama shape with random weights on
one rank and on `--ranks`; the second must give every rank the same tokens, else the exit status is 1. `70b` has half of
its 80 layers, so that one GPU holds it in bfloat16 before it is patched; twice its time a token is that of the whole.
`--tiny` runs a tiny model by gloo on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import accelpatch
from accelpatch.bench.timing import between_events, once, timing
from accelpatch.parallel import launch
from accelpatch.parallel.group import joined
from scripts.benchmarks.engines import by_tokens, ids_of, plain, shaped
from scripts.benchmarks.harness import ROOT, TINY, Option, Table, cases, table

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
        for one, other in itertools.permutations(range(dist.get_world_size()), 2)
    ]
    answer = _one_shot(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
    if not isinstance(answer, str):
        answer = "works" if bool((answer() == dist.get_world_size()).all()) else "gives a wrong sum"
    return [*found, {"question": "one-shot all-reduce over symmetric memory", "answer": answer}]


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
        times = {f"{name}, us": None if isinstance(way, str) else _captured(way) for name, way in ways.items()}
        rows.append({"KB": size >> 10} | times)
    return rows


def _captured(way: Any) -> float:
    """Microseconds of one call among IN_A_GRAPH of a graph: the median of 20 replays, after 3.

    The graph is captured in the thread-local mode, since the communicator's own thread asks the device meanwhile; every
    rank replays it as often.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(IN_A_GRAPH):
            way()
    return 1e6 * timing([between_events(graph.replay) for _ in range(23)][3:]).median / IN_A_GRAPH


def generated(case: str, asked: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Tokens a second of a shape and a recipe, `shape-recipe`, on this rank; its tokens too."""
    shape, recipe = case.split("-")
    model = shaped(shape, argparse.Namespace(device="cpu" if asked.tiny else "cuda", tiny=asked.tiny))
    device = next(model.parameters()).device
    patch = partial(accelpatch.patch, model, recipe, keep_original="none", verify="quick")
    seconds = once(partial(patch, parallel="tp" if ranks > 1 else None), device)
    ids = ids_of(model, asked.batch, 32)
    row = by_tokens(model, ids, asked.new, asked.repeats)
    return row | {"patch, s": seconds, "tokens": plain(model, ids, 16)[0, 32:].tolist()}


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
    shapes, found, rates = [case for case in asked.cases if "-" in case], dict[str, Any](), Table("greedy generate()")
    with tempfile.TemporaryDirectory() as folder:
        every = started(asked, asked.ranks, folder, asked.cases)
        alone = started(asked, 1, folder, shapes)[0] if shapes else {}
    for case in (one for one in every[0] if one not in shapes):
        found[case] = table(every[0][case], case)
    asked.status = 0
    for case in shapes:
        same = all(one[case]["tokens"] == every[0][case]["tokens"] for one in every)
        asked.status |= int(not same)
        for ranks, row in ((1, alone[case]), (asked.ranks, every[0][case])):
            said = "" if ranks == 1 else "the same on all ranks" if same else "DIFFER"
            times = {"times one": row["tok/s"] / alone[case]["tok/s"]}
            rates.add({"case": case, "batch": asked.batch, "ranks": ranks} | row | times | {"tokens": said})
    return found | {"rows": rates.rows}
