"""Tensor parallel on the GPUs of one machine: peer memory, all-reduces in a captured loop, tokens a second.

One job of `--ranks` processes measures all cases, and prints each row as soon as it is known. `peer` answers first
whether the GPUs can read each other's memory, and whether torch's symmetric memory works over it. `all_reduce` times
sums of 4 KB to 1 MB, 64 of them in one graph, alone and with a residual: by NCCL (RCCL), by the one-shot kernel of
symmetric memory (without NVLink multicast) and by our own, `push`. The others time greedy generate() of a Llama shape
with random weights on one rank and on all of them, by each of `--ways`; all ranks must have the same tokens, else the
exit status is 1. `70b` has half of its 80 layers, so that one GPU holds it in bfloat16 before it is patched; twice its
time a token is that of the whole. With `--timeline` one call is recorded, and its kernels are listed, a step. `--tiny`
runs a tiny model by gloo on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import accelpatch
from accelpatch.bench.timing import between_events, once, timing
from accelpatch.errors import PatchError
from accelpatch.parallel import launch
from accelpatch.parallel.group import Group, joined
from scripts.benchmarks.engines import by_tokens, freed, ids_of, plain, shaped
from scripts.benchmarks.harness import ROOT, TINY, Option, Table, cases
from scripts.benchmarks.step_kernels import kernels_of_a_step

CASES = ["peer", "all_reduce", "7b-exact", "7b-int4", "70b-int4"]
SIZES = tuple(kilobytes << 10 for kilobytes in (4, 8, 16, 32, 64, 128, 256, 512, 1024))  # bytes
IN_A_GRAPH = 64
WAYS = ["nccl", "one_shot", "push"]
OPTIONS = (
    cases(CASES, "What is measured.", [*CASES, "70b-exact", "tiny-exact", "tiny-int4"]),
    Option("ranks", 2, "Ranks, each on a GPU of its own."),
    Option("ways", WAYS, "By what small messages are added up.", choices=WAYS),
    Option("batches", [1, 32], "Sequences of a call of generate()."),
    Option("prompt", 32, "Tokens of each sequence's prompt."), Option("new", 128, "New tokens of a call."),
    Option("repeats", 3, "Timed calls, of which the median counts."),
    Option("timeline", "", "A folder for the trace of one call of each case.", metavar="FOLDER"),
    Option("child", "", "The folder for the figures; this program starts its ranks with it."), TINY,
)  # fmt: skip


def peer(group: Group) -> list[dict[str, Any]]:
    """Whether each pair of GPUs can read each other's memory, and whether symmetric memory works."""
    if group.device is None:
        return [{"question": "peer memory", "answer": "there is none between CPUs"}]
    found = [
        {"question": f"can cuda:{one} read cuda:{other}", "answer": str(torch.cuda.can_device_access_peer(one, other))}
        for one, other in itertools.permutations(range(group.world), 2)
    ]
    return [
        *found,
        *(
            {"question": f"one-shot all-reduce over symmetric memory, {way}", "answer": taken(group, way) or "works"}
            for way in WAYS[1:]
        ),
    ]


def taken(group: Group, way: str) -> str | None:
    """From here on the ranks add up by `way`; or why they cannot."""
    try:
        group.sum_by(way)
    except PatchError as error:
        return str(error)
    return None


def all_reduce(group: Group) -> list[dict[str, Any]]:
    """Microseconds of a sum over all ranks, by size and way; None where it does not go that way."""
    rows = []
    for size in SIZES:
        row: dict[str, Any] = {"KB": size >> 10}
        for way in WAYS:
            x, residual = torch.zeros(2, size // 2, dtype=torch.bfloat16, device=group.device or "cpu")
            can = taken(group, way) is None and (way == "nccl" or (group.peers is not None and group.peers.takes(x)))
            row[f"{way}, us"] = _microseconds(lambda x=x: group.all_reduce_(x), group) if can else None
            both = _microseconds(lambda x=x, r=residual: group.all_reduce_(x, r), group) if can else None
            row[f"{way} and residual, us"] = both
        rows.append(row)
    return rows


def _microseconds(sum_up: Any, group: Group) -> float:
    """Of one call among IN_A_GRAPH of a graph: the median of 20 replays, after 3. On a CPU, of one among as many calls.

    The graph is captured in the thread-local mode, since the communicator's own thread asks the device meanwhile; every
    rank replays it as often.
    """
    if group.device is None:
        return (
            1e6 * timing([once(lambda: [sum_up() for _ in range(8)], torch.device("cpu")) for _ in range(3)]).median / 8
        )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            sum_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(IN_A_GRAPH):
            sum_up()
    return 1e6 * timing([between_events(graph.replay) for _ in range(23)][3:]).median / IN_A_GRAPH


def generated(case: str, asked: argparse.Namespace, way: str | None) -> list[dict[str, Any]]:
    """A row a batch of a shape and a recipe, `shape-recipe`, on this rank alone (way: None), or on all of them.

    "logits": of a prompt, the last position's. "tokens": of every sequence.
    """
    model, seconds = _patched(case, asked, None if way is None else "tp")
    rows = []
    for batch in asked.batches:
        ids = ids_of(model, batch, asked.prompt)
        row = by_tokens(model, ids, asked.new, asked.repeats) | {"patch, s": seconds}
        with torch.inference_mode():
            row["logits"] = model(ids[:1]).logits[0, -1].float().cpu()
        rows.append(row | {"tokens": plain(model, ids, 16)[:, asked.prompt :].cpu().tolist()})
        if asked.timeline and batch == asked.batches[0]:
            kernels_of_a_step(model, ids, Path(asked.timeline) / f"{case}-{way or 'one'}.json.gz", way or "one GPU")
    return rows


def _patched(case: str, asked: argparse.Namespace, parallel: str | None) -> tuple[Any, float]:
    """The model of a case, and the seconds of its patch."""
    shape, recipe = case.split("-")
    model = shaped(shape, argparse.Namespace(device="cpu" if asked.tiny else "cuda", tiny=asked.tiny))
    options: dict[str, Any] = {"keep_original": "none", "verify": "quick", "progress": False}
    call = partial(accelpatch.patch, model, recipe, parallel=parallel, **options)
    return model, once(call, next(model.parameters()).device)


def compared(case: str, asked: argparse.Namespace, group: Group) -> tuple[list[dict[str, Any]], bool]:
    """Rows of a case on rank 0 alone, while the others wait, and on all ranks; whether all had the same tokens."""
    alone = group.exchange(generated(case, asked, None) if group.rank == 0 else None)[0]
    freed()
    rates, same = Table(f"greedy generate(), {case}"), True
    for way in [None, *asked.ways]:
        if way is not None and (why := taken(group, way)) is not None:
            print(f"{case}, {way}: {why}", flush=True)
            continue
        every = [alone] if way is None else group.exchange(generated(case, asked, way))
        freed()
        for place, batch in enumerate(asked.batches):
            row, due = dict(every[0][place]), alone[place]
            alike = all(one[place]["tokens"] == row["tokens"] for one in every)
            same &= alike
            apart = float((row.pop("logits") - due["logits"]).abs().max() / due["logits"].abs().max())
            row |= {"times one": row["tok/s"] / due["tok/s"], "logits apart": apart}
            row["tokens"] = "" if way is None else "the same on all ranks" if alike else "DIFFER"
            if group.rank == 0:
                rates.add({"case": case, "batch": batch, "ranks": len(every), "way": way or ""} | row)
    return rates.rows, same


def child(asked: argparse.Namespace) -> None:
    """One rank. The first prints, and writes its figures to a file after each case."""
    group, status = joined(), 0
    found: dict[str, Any] = {"rows": []}
    for case in asked.cases:
        measure: Any = {"peer": peer, "all_reduce": all_reduce}.get(case)
        if measure is None:
            rows, same = compared(case, asked, group)
            found["rows"] += rows
            status |= int(not same)
        else:
            rows = measure(group)
            printed = Table(case)
            if group.rank == 0:
                printed.add(*rows)
            found[case] = rows
        if group.rank == 0:
            (Path(asked.child) / "found.json").write_text(json.dumps(found | {"status": status}))


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, which print. Exit status 1 where they have different tokens, or where one fails."""
    if asked.child:
        child(asked)
        return {}
    words = [sys.executable, str(ROOT / "scripts/bench.py"), "tensor_parallel", "--cases", *asked.cases]
    words += ["--ways", *asked.ways, "--batches", *map(str, asked.batches)]
    for name in ("ranks", "prompt", "new", "repeats"):
        words += [f"--{name}", str(getattr(asked, name))]
    words += ["--timeline", str(Path(asked.timeline).resolve())] if asked.timeline else []
    words += ["--tiny"] if asked.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        file, failed = Path(folder) / "found.json", ""
        try:
            paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            launch.run(
                [*words, "--child", folder], asked.ranks,
                {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "PYTHONPATH": paths},
            )  # fmt: skip
        except PatchError as error:
            failed = str(error)
            print(failed, file=sys.stderr)
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    asked.status = int(bool(failed)) | found.pop("status", 0)
    return found
