"""Models that accelerate spreads over GPUs, or offloads to the CPU and the disk: tokens a second, patched and not.

    python scripts/bench.py parallel [--model llama2-7b] [--dtype bfloat16] [--recipes exact int4]
        [--cases one auto ...] [--new 64] [--offloaded-new 8] [--repeats 3] [--part 0.25] [--folder FOLDER] [--tiny]

A case is a map: `one` is the first GPU alone; `auto`, `balanced`, `balanced_low_0` and `sequential` are accelerate's
maps over two GPUs, with room for a little more than half of the model on each (`auto` without that, as it is by
default); `hand` has the ends on the first GPU and the first half of the layers on the second; `cpu` and `disk` have the
last `--part` of the layers, the last norm and the head offloaded there from one GPU. In each map the model runs
unpatched first, and each recipe's logits of a prompt are compared with those of the same recipe on one device, which
must be within a relative RMSE of 0.02, else the exit status is 1. The first call of generate() captures and is not
counted. Random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor

import accelpatch
from accelpatch.bench.timing import timing
from scripts.benchmarks.engines import STOCK, freed, random_model
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

GPU_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "hand")
OFFLOADED = ("cpu", "disk")
CASES = ["one", *GPU_MAPS, *OFFLOADED]
ROOM = 0.58  # of the model's bytes, for each of two GPUs
LOW = 0.75  # and for the second one, where the first gets what is left
BOUND = 0.02  # relative RMSE of a prompt's logits, against the same recipe on one device
PROMPT = 32
OPTIONS = (
    *common(model="llama2-7b", device="cuda:0", dtype="bfloat16", recipes=["exact", "int4"], repeats=3),
    cases(CASES, "The maps."), Option("new", 64, "Tokens of a call of generate()."),
    Option("offloaded_new", 8, "The same where weights are offloaded."),
    Option("part", 0.25, "The part of the layers that is offloaded."),
    Option("folder", None, "Where offloaded weights are written. It is a temporary folder if not given."), TINY,
)  # fmt: skip


def ends_of(model: Any) -> dict[str, Any]:
    """The parts beside the layers."""
    return dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)


def layout(kind: str, model: Any, part: float) -> dict[str, Any] | None:
    """The map of a kind; None for one device."""
    layers = [f"model.layers.{place}" for place in range(len(model.model.layers))]
    if kind == "one":
        return None
    if kind in OFFLOADED:
        kept = len(layers) - max(1, round(part * len(layers)))
        off = dict.fromkeys((*layers[kept:], "model.norm", "lm_head"), kind)
        return ends_of(model) | dict.fromkeys(layers[:kept], 0) | off
    if kind == "hand":
        half = len(layers) // 2
        return ends_of(model) | dict.fromkeys(layers[:half], 1) | dict.fromkeys(layers[half:], 0)
    whole = sum(p.nbytes for p in model.parameters())
    room: Any = {0: int(ROOM * whole), 1: int(ROOM * whole)}
    names = list(model._no_split_modules)
    if kind != "sequential":
        low = kind == "balanced_low_0"
        room = None if kind == "auto" else {0: whole, 1: int(LOW * whole)} if low else room
        room = get_balanced_memory(model, room, names, low_zero=low)
        if low:  # or a layer that falls between the two would be offloaded
            room[0] += 2 * sum(p.nbytes for p in model.model.layers[0].parameters())
    found: dict[str, Any] = infer_auto_device_map(model, room, no_split_module_classes=names)
    return found


def spread(model: Any, kind: str, asked: argparse.Namespace, folder: str) -> Any:
    """The model, spread by a map."""
    places = layout(kind, model, asked.part)
    if places is None:
        return model
    first: Any = "cpu" if asked.tiny else 0
    places = {name: first if place == 0 else place for name, place in places.items()}
    if kind in OFFLOADED:
        model.to("cpu")  # accelerate leaves weights that it offloads to "cpu" where they are
    return dispatch_model(model, places, main_device=first, offload_dir=folder, force_hooks=True)


class Clock:
    """A streamer that notes when each token comes; the first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All tokens are there."""


def timed(model: Any, batch: dict[str, Tensor], new: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of greedy generate(), from the first new token of a call to its last: the median of the calls,
    and their spread."""
    seconds = []
    for _ in range(repeats + 1):
        clock = Clock()
        model.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=clock)
        seconds.append((clock.times[-1] - clock.times[1]) / (len(clock.times) - 2))
    taken = timing(seconds[1:])  # the first call captures
    return {"tok/s": 1 / taken.median, "spread": taken.spread}


def way_of(model: Any) -> str:
    """How the patched model's steps ran, most often."""
    paths = {path: count for path, count in model.accelpatch.report().paths.items() if "prefill" not in path}
    ways = [path for path in paths if not path.startswith(("captured step", "modules: a prompt"))]
    return max(ways, key=lambda path: paths[path], default="modules")


def rows_of(kind: str, asked: argparse.Namespace, printed: Table, due: dict[str, Tensor]) -> bool:
    """The figures of one map; whether all logits and sites are within their bounds.

    due: recipe -> logits on one device, which the map `one` fills in.
    """
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        model = spread(random_model(asked), kind, asked, folder)
        ids = torch.randint(5, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        ids, good, rates = (
            ids.to(asked.device),
            True,
            {row["map"] + row["engine"]: row["tok/s"] for row in printed.rows},
        )
        batch, new = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, asked.new
        for place, recipe in enumerate((STOCK, *asked.recipes)):
            start, failures = time.perf_counter(), ()
            if recipe != STOCK:
                last = place == len(asked.recipes)
                accelpatch.patch(model, recipe, keep_original="none" if last and kind not in OFFLOADED else "cpu")
                failures = model.accelpatch.report().verification.failures
            seconds = time.perf_counter() - start
            with torch.no_grad():
                found = model(**batch).logits.float().cpu()
            apart = float((found - due.setdefault(recipe, found)).norm() / due[recipe].norm())
            over = " over the bound" if apart > BOUND or failures else ""
            row = timed(model, batch, asked.offloaded_new if kind in OFFLOADED else new, asked.repeats)
            rates[kind + recipe] = row["tok/s"]
            one = rates.get(f"one{recipe}")
            printed.add({"map": kind, "engine": recipe} | row | {
                "times one": row["tok/s"] / one if one else None, f"times {STOCK}": row["tok/s"] / rates[kind + STOCK],
                "apart": apart, "bound": over.strip(), "patch, s": seconds,
                "by": "" if recipe == STOCK else way_of(model),
            })  # fmt: skip
            good &= not over
            if recipe != STOCK and place < len(asked.recipes):
                accelpatch.unpatch(model)
    return good


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row a map and engine. Exit status 1 where logits differ, or a site is over its bound."""
    gpus = 0 if asked.tiny else torch.cuda.device_count()
    due, good = dict[str, Tensor](), True
    printed = Table(f"{asked.model}, {max(gpus, 1)} devices, median of {asked.repeats} after 1 to warm up")
    for kind in asked.cases:
        if kind in GPU_MAPS and gpus < 2:
            print(f"{kind}: it needs two GPUs", flush=True)
            continue
        good &= rows_of(kind, asked, printed, due)
        freed()
    asked.status = int(not good)
    return {"rows": printed.rows}
