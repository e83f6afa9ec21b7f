"""Models that accelerate spreads over GPUs, or offloads to the CPU and the disk: tokens a second, patched and not.

A case is a map: `one` is the first GPU alone; `auto`, `balanced`, `balanced_low_0` and `sequential` are accelerate's
maps over two GPUs, with room for a little more than half of the model on each (`auto` without that, as it is by
default); `hand` has the ends on the first GPU and the first half of the layers on the second; `cpu` and `disk` have the
last `--part` of the layers, the last norm and the head offloaded there from one GPU. In each map the model runs
unpatched first, and each recipe's logits of a prompt are compared with those of the same recipe on one device, which
must be within a relative RMSE of 0.02, else the exit status is 1. Random weights.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor

import accelpatch
from accelpatch.bench.timing import once
from scripts.benchmarks.engines import STOCK, by_tokens, freed, ids_of, random_model, turns
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

GPU_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "hand")
OFFLOADED = ("cpu", "disk")
ROOM = 0.58  # of the model's bytes, for each of two GPUs
LOW = 0.75  # and for the second one, where the first gets what is left
BOUND = 0.02  # relative RMSE of a prompt's logits, against the same recipe on one device
OPTIONS = (
    *common(model="llama2-7b", device="cuda:0", dtype="bfloat16", recipes=["exact", "int4"], repeats=3),
    cases(["one", *GPU_MAPS, *OFFLOADED], "The maps."), Option("new", 64, "Tokens of a call of generate()."),
    Option("offloaded_new", 8, "The same where weights are offloaded."),
    Option("part", 0.25, "The part of the layers that is offloaded."),
    Option("folder", None, "Where offloaded weights are written. It is a temporary folder if not given."), TINY,
)  # fmt: skip


def layout(kind: str, model: Any, part: float) -> dict[str, Any] | None:
    """The map of a kind; None for one device."""
    layers = [f"model.layers.{place}" for place in range(len(model.model.layers))]
    ends: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)
    if kind == "one":
        return None
    if kind in OFFLOADED:
        kept = len(layers) - max(1, round(part * len(layers)))
        return ends | dict.fromkeys(layers[:kept], 0) | dict.fromkeys((*layers[kept:], "model.norm", "lm_head"), kind)
    if kind == "hand":
        half = len(layers) // 2
        return ends | dict.fromkeys(layers[:half], 1) | dict.fromkeys(layers[half:], 0)
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


def rows_of(kind: str, asked: argparse.Namespace, printed: Table, due: dict[str, Tensor], folder: str) -> bool:
    """The figures of one map; whether all logits and sites are within their bounds.

    due: recipe -> logits on one device, which the map `one` fills in.
    """
    model, good = spread(random_model(asked), kind, asked, folder), True
    ids, new = ids_of(model, 1, 32).to(asked.device), asked.offloaded_new if kind in OFFLOADED else asked.new
    for place, recipe in enumerate((STOCK, *asked.recipes)):
        seconds, failures, last = 0.0, (), place == len(asked.recipes)
        if recipe != STOCK:
            keep = "none" if last and kind not in OFFLOADED else "cpu"
            seconds = once(partial(accelpatch.patch, model, recipe, keep_original=keep), torch.device(asked.device))
            failures = model.accelpatch.report().verification.failures
        with torch.no_grad():
            found = model(ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()
        apart = float((found - due.setdefault(recipe, found)).norm() / due[recipe].norm())
        row = {"map": kind, "engine": recipe} | by_tokens(model, ids, new, asked.repeats)
        rates = {(one["map"], one["engine"]): one["tok/s"] for one in [*printed.rows, row]}
        one, over = rates.get(("one", recipe)), bool(apart > BOUND or failures)
        printed.add(row | {
            "times one": row["tok/s"] / one if one else None, f"times {STOCK}": row["tok/s"] / rates[kind, STOCK],
            "apart": apart, "bound": "over the bound" * over, "patch, s": seconds,
        })  # fmt: skip
        good &= not over
        if recipe != STOCK and not last:
            accelpatch.unpatch(model)
    return good


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row a map and engine. Exit status 1 where logits differ, or a site is over its bound."""
    gpus = 0 if asked.tiny else torch.cuda.device_count()
    due, good = dict[str, Tensor](), True
    printed = Table(f"{asked.model}, {max(gpus, 1)} devices, {turns(asked.repeats, 1)}")
    for kind in asked.cases:
        if kind in GPU_MAPS and gpus < 2:
            print(f"{kind}: it needs two GPUs", flush=True)
            continue
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            good &= rows_of(kind, asked, printed, due, folder)
        freed()
    asked.status = int(not good)
    return {"rows": printed.rows}
