"""Topics beside decoding: patches, first tokens, saving and loading, and checks before each call."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import accelpatch
from accelpatch import api
from accelpatch.bench.timing import once, synchronize
from accelpatch.models import load as loading
from accelpatch.patching.extent import LEVELS
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.watch import Watch
from scripts.benchmarks.engines import allocated, freed, in_turn, random_model, shaped, turns
from scripts.benchmarks.harness import ROOT, TINY, Case, Option, Table, Topic, cases, common, table

Found = dict[str, Any]
RECIPE = Option("recipe", "int8", "A bundled recipe, or a YAML file.")


def patch(asked: argparse.Namespace) -> Found:
    """A row for each level; the levels take turns, and the first turn, in which kernels are loaded, is left out."""
    make = api.random_model if asked.random else lambda name, **options: api.load(name, **options).model
    model = make(asked.model, device=torch.device(asked.device), dtype=asked.dtype)

    def patching(level: str) -> dict[str, float]:
        call = partial(accelpatch.patch, model, asked.recipe, verify=level, progress=False)
        whole = once(call, torch.device(asked.device))
        stages = {f"{name}, s": seconds for name, seconds in model.accelpatch.report().seconds.items()}
        accelpatch.unpatch(model)
        return {"patch, s": whole} | stages

    found = in_turn({level: partial(patching, level) for level in asked.cases}, asked.repeats, 1)
    printed = Table(f"{asked.model}, {asked.recipe}, {turns(asked.repeats, 1)}")
    for level, every in found.items():
        times = [one["patch, s"] for one in every]
        row: Found = {"verify": level, "patch, s": 0.0, "fastest to slowest, s": (min(times), max(times))}
        printed.add(row | {name: statistics.median(one.get(name, 0.0) for one in every) for name in every[0]})
    return {"rows": printed.rows}


BARE: dict[str, Any] = {"verify": False, "keep_original": "none"}
#: options of patch(), by case of `start`
PROCESSES: dict[str, dict[str, Any]] = {"cold": BARE, "warm": BARE, "defaults": {}, "again": {}}


def child(asked: argparse.Namespace, recipe: str, case: str) -> None:
    """One process: make ready, say so, wait for the word, and print the figures as a line of JSON."""
    model, device = random_model(asked), torch.device(asked.device)
    ids = Case(1, asked.prompt, 1).ids(model)
    synchronize(device)
    print("ready", flush=True)
    sys.stdin.readline()
    calls: dict[str, Callable[[], object]] = {
        "patch, s": partial(accelpatch.patch, model, recipe, progress=False, **PROCESSES[case])
    }
    for name, new in (("first token, s", 1), ("the next call, s", 1), ("a call for two, s", 2)):
        calls[name] = partial(model.generate, ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    times = {name: once(call, device) for name, call in calls.items()}
    stages = {f"{name}, s": seconds for name, seconds in model.accelpatch.report().seconds.items()}
    both = {"patch to first token, s": times["patch, s"] + times["first token, s"]}
    print(json.dumps({"recipe": recipe, "case": case} | both | times | stages))


def begun(asked: argparse.Namespace, recipe: str, case: str, kernels: str) -> subprocess.Popen[str]:
    """A process on its way; Triton keeps its kernels in `kernels`."""
    words = ["--child", recipe, case, "--model", asked.model, "--device", asked.device, "--prompt", str(asked.prompt)]
    command = [sys.executable, str(ROOT / "scripts/bench.py"), "start", *words, *["--tiny"] * asked.tiny]
    where = {**os.environ, "TRITON_CACHE_DIR": kernels}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where)


def start(asked: argparse.Namespace) -> Found:
    """A row a process, printed as they come; a recipe's processes are gone before the next one's begin."""
    if asked.child:
        child(asked, *asked.child)
        return {}
    printed = Table(f"{asked.model}, prompt {asked.prompt}, each once")
    for recipe in asked.recipes:
        with tempfile.TemporaryDirectory() as kernels:
            processes = {case: begun(asked, recipe, case, kernels) for case in asked.cases}
            for process in processes.values():
                assert process.stdout is not None
                while (line := process.stdout.readline()) and line.strip() != "ready":
                    print(line, end="", flush=True)
            for case, process in processes.items():
                lines = process.communicate("go\n")[0].strip().splitlines()
                printed.add(json.loads(lines[-1]) if lines else {"recipe": recipe, "case": f"{case}: no result"})
    return {"rows": printed.rows}


def drop_from_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for file in folder.iterdir():
        held = os.open(file, os.O_RDONLY)
        os.fsync(held)
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(held)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, Found]:
    """What a call returned, and its seconds and peak of memory: torch's on a GPU, the process's on a CPU."""
    freed()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    made: list[Any] = []
    seconds = once(lambda: made.append(call()), device)
    peak = allocated(device, peak=True) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return made[0], {"taken, s": seconds, "peak, GB": peak}


def checkpoint(asked: argparse.Namespace) -> Found:
    """In a folder that goes: save, read plainly, load, and quantise while loading."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        plain, saved = Path(folder) / "float", Path(folder) / "saved"
        model: Any = loading.random(asked.model, dtype=dtype, device=device)
        model.save_pretrained(plain, max_shard_size="5GB")
        accelpatch.patch(model, asked.recipe, keep_original="none")
        ids = torch.arange(5, 69, device=device)[None]
        with torch.no_grad():
            due = model(ids).logits
        printed = Table(f"{asked.model}, {asked.recipe}")
        printed.add({"what": "save"} | timed(partial(model.save_pretrained, saved), device)[1])
        del model
        load = partial(accelpatch.load, device=device)
        calls: dict[str, tuple[Path, Callable[[], Any]]] = {
            "load_file": (saved, lambda: [load_file(one, device=str(device)) for one in saved.glob("*.safetensors")]),
            "load": (saved, lambda: load(str(saved)).model),
            "quantise while loading": (plain, lambda: load(str(plain), asked.recipe).model),
        }
        for what, (files, call) in calls.items():
            for _ in range(1 if files == plain else 2):  # the second counts, when libraries are loaded already
                made = None
                if files == saved:
                    drop_from_cache(files)
                made, row = timed(call, device)
            if what != "load_file":
                with torch.no_grad():
                    row["same logits"] = bool(torch.equal(made(ids).logits, due))
                row["result, GB"] = made.accelpatch.report().resident_bytes[1] / 1e9
                row["times the read, less 1 s"] = (row["taken, s"] - 1.0) / printed.rows[1]["taken, s"]
            printed.add({"what": what} | row)
    return {"rows": printed.rows}


def checks(asked: argparse.Namespace) -> Found:
    """Microseconds of a look and of a check, in a Llama of small layers: only the number of modules matters."""
    given = argparse.Namespace(tiny=True, device="cpu")
    model = shaped("llama", given, num_hidden_layers=asked.layers)
    accelpatch.patch(model, "exact", verify=False)
    code, watch = vars(model)[CODE], Watch(model)

    def look() -> None:
        with code:
            pass

    def check() -> None:
        watch.stale() or watch.objection() or watch.watched()

    calls = {"look at code, once a call": (look, 1000), "check, before each step": (check, 300)}
    rows = [
        {"what": name, "taken, us": min(timeit.repeat(call, number=number, repeat=asked.repeats)) / number * 1e6}
        for name, (call, number) in calls.items()
    ]
    modules = sum(1 for _ in model.modules())
    return {"rows": table(rows, f"{asked.layers} layers, {modules} modules, fastest of {asked.repeats} rounds")}


TOPICS = {
    "patch": Topic(
        "Seconds that patch() takes at each level of verification, and its stages: medians, and the ends.",
        (*common(model="smollm2-135m", device="cpu", dtype="auto", repeats=5),
         cases(list(LEVELS), "Levels of verification."), RECIPE,
         Option("random", False, "Take random weights, for models that are not here.")),
        patch,
    ),
    "start": Topic(
        "Seconds from patch() to the first token in processes that have just begun.\n\n"
        "The processes of a recipe make their model side by side, and then take the timed part one after the other,\n"
        "the rest of them idle. `cold`: Triton's cache of compiled kernels is empty, the device library is there.\n"
        "`warm`: the same with the cache that the cold one has filled. Both without verification and with the\n"
        "originals freed. `defaults`: after these, patch() with no option at all. `again`: the same once more.",
        (*common(model="llama2-7b", device="cuda", recipes=["exact", "compact", "int8", "int4"]),
         cases(PROCESSES, "The processes of each recipe, in this order."),
         Option("prompt", 128, "Tokens of the prompt."), TINY,
         Option("child", [], "Be the process of a recipe and a case, as this program starts it.")),
        start,
    ),
    "checkpoint": Topic(
        "Saving and loading of a patched model: seconds beside a plain read of the files, and the peak of memory.\n\n"
        "Random weights. Files that are loaded are dropped from the page cache before; the second of two counts.",
        (*common(model="llama2-7b", device="cuda", dtype="bfloat16"), Option("recipe", "int4", "The recipe."),
         Option("folder", None, "Where checkpoints are written. It is a temporary folder if not given.", kind=Path)),
        checkpoint,
    ),
    "checks": Topic(
        "What a call of a patched model pays for checks: the look at code, and the check before a step.\n\n"
        "The look (runtime/code_watch.py) is once a call of the model or of generate(), the other (runtime/watch.py)\n"
        "before each step. Fastest of the rounds.",
        (Option("layers", 32, "Decoder layers of the model."),
         Option("repeats", 11, "Rounds, of which the fastest counts.")),
        checks,
    ),
}  # fmt: skip
