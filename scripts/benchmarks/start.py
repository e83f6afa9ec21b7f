"""Seconds from patch() to the first token in processes that have just begun.

    python scripts/bench.py start [--model llama2-7b] [--recipes exact compact int8 int4]
        [--cases cold warm defaults again] [--prompt 128]

Every case of a recipe is a process of its own. They all make their model (the named shape, random bf16 weights, on the
device) side by side, and then take the timed part one after the other, the rest of them idle. `cold`: Triton's cache of
compiled kernels is empty, the device library is there. `warm`: the same with the cache that the cold one has filled.
Both without verification and with the originals freed. `defaults`: after these, patch() with no option at all; kernels
that only verification runs are compiled in it, and read from the disk. `again`: the same once more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import accelpatch
from accelpatch.bench.timing import synchronize
from scripts.benchmarks.engines import random_model
from scripts.benchmarks.harness import ROOT, TINY, Case, Option, Table, cases, common

BARE: dict[str, Any] = {"verify": False, "keep_original": "none"}
CASES: dict[str, dict[str, Any]] = {"cold": BARE, "warm": BARE, "defaults": {}, "again": {}}  # options of patch()
READY, GO = "ready", "go\n"
OPTIONS = (
    *common(model="llama2-7b", device="cuda", recipes=["exact", "compact", "int8", "int4"]),
    cases(CASES, "The processes of each recipe, in this order."),
    Option("prompt", 128, "Tokens of the prompt."), TINY,
    Option("child", [], "Be the process of a recipe and a case, as this program starts it."),
)  # fmt: skip


def child(asked: argparse.Namespace, recipe: str, case: str) -> None:
    """One process: make ready, say so, wait for the word, and print the figures as a line of JSON."""
    model, device = random_model(asked), torch.device(asked.device)
    ids = Case(1, asked.prompt, 1).ids(model)
    synchronize(device)
    print(READY, flush=True)
    sys.stdin.readline()
    times = [time.perf_counter()]
    accelpatch.patch(model, recipe, progress=False, **CASES[case])
    synchronize(device)
    times.append(time.perf_counter())
    for new in (1, 1, 2):
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        synchronize(device)
        times.append(time.perf_counter())
    names = ("patch, s", "first token, s", "the next call, s", "a call for two, s")
    report = model.accelpatch.report()
    found = {"recipe": recipe, "case": case, "patch to first token, s": times[2] - times[0]}
    found |= {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}
    print(json.dumps(found | {f"{name}, s": seconds for name, seconds in report.seconds.items()}))


def begun(asked: argparse.Namespace, recipe: str, case: str, kernels: str) -> subprocess.Popen[str]:
    """A process on its way; Triton keeps its kernels in `kernels`."""
    words = ["--child", recipe, case, "--model", asked.model, "--device", asked.device, "--prompt", str(asked.prompt)]
    command = [sys.executable, str(ROOT / "scripts/bench.py"), "start", *words, *["--tiny"] * asked.tiny]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_CACHE_DIR": kernels},
    )  # fmt: skip


def taken(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The figures of a process that is ready, now that it may go."""
    out, _ = process.communicate(GO)
    return dict(json.loads(out.strip().splitlines()[-1])) if out.strip() else {"recipe": "", "case": "no result"}


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row a process, printed as they come; a recipe's processes are gone before the next one's begin."""
    if asked.child:
        child(asked, *asked.child)
        return {}
    printed = Table(f"{asked.model}, prompt {asked.prompt}, each once")
    for recipe in asked.recipes:
        with tempfile.TemporaryDirectory() as kernels:
            processes = [begun(asked, recipe, case, kernels) for case in asked.cases]
            for process in processes:
                assert process.stdout is not None
                while (line := process.stdout.readline()) and line.strip() != READY:
                    print(line, end="", flush=True)
            for process in processes:
                printed.add(taken(process))
    return {"rows": printed.rows}
