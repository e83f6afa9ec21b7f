"""Tensor parallel on eight GPUs on paper: tokens a second that measured parts come to. A projection: nobody ran it.

A step on one of n ranks takes
  the bytes of its weights (by the plan of rank 0) and of its keys and values, at the read limit of the machine,
  the rest of a step, which is what one H200 took beyond its bytes, and
  the all-reduces (two a layer, one of the embedding) and the gathering of the logits.
The rest is known of one GPU alone. Each cell has two ends: in one the rest is that of as many layers, however many
ranks there are (launches, norms); in the other it goes with the bytes of a rank's weights (arithmetic). Every number
of a measurement, a publication or a data sheet stands in projection.json with its source.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import transformers

from accelpatch.in_memory import plan_from_config
from scripts.benchmarks.engines import SHAPES
from scripts.benchmarks.harness import Option, Table

MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "projection.json").read_text())
RANKS, NEW, NO_ROOM = (1, 2, 4, 8), 128, "no room"
MODELS = {"Llama-2-7B": SHAPES["7b"]["config"], "Llama-2-70B": SHAPES["70b"]["config"] | {"num_hidden_layers": 80}}
OPTIONS = (
    Option("machines", ["H200", "MI300X"], "Of which eight are taken.", choices=list(MEASURED["machines"])),
    Option("models", list(MODELS), "Shapes of the models.", choices=list(MODELS)),
    Option("recipes", ["exact", "int4"], "Formats of the weights: bfloat16 or 4 bits.", choices=["exact", "int4"]),
    Option("batches", [1, 32], "Sequences at once."),
    Option("prompts", [128, 4096], "Tokens of each sequence's prompt."),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """So many sequences of a model and recipe on so many GPUs of a machine."""

    machine: str
    model: str
    recipe: str
    batch: int
    prompt: int
    ranks: int

    @property
    def config(self) -> transformers.LlamaConfig:
        return _config(self.model)

    @property
    def about(self) -> Mapping[str, Any]:
        """What is known of the machine."""
        found: Mapping[str, Any] = MEASURED["machines"][self.machine]
        return found

    def cached(self, length: int) -> int:
        """Bytes of a rank's keys and values of so many tokens of each sequence, in 16 bits."""
        heads = math.ceil(self.config.num_key_value_heads / self.ranks)
        size = self.config.hidden_size // self.config.num_attention_heads
        return 2 * 2 * self.config.num_hidden_layers * heads * size * length * self.batch

    @property
    def fits(self) -> bool:
        """Whether a rank's weights, and keys and values up to the last token, are within the memory of its GPU."""
        held = bytes_of(self.model, self.recipe, self.ranks)[1] + self.cached(self.prompt + NEW)
        return held <= self.about["memory_gb"] * 1e9 * (1 - MEASURED["reserve"])


@functools.cache
def _config(model: str) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**MODELS[model], architectures=["LlamaForCausalLM"], dtype="bfloat16")


@functools.cache
def bytes_of(model: str, recipe: str, ranks: int) -> tuple[int, int]:
    """Bytes of weights that the first rank reads a step, and holds: of the plan. Other ranks have no more."""
    with tempfile.TemporaryDirectory() as folder:
        _config(model).save_pretrained(folder)
        plan = plan_from_config(folder, recipe, arch="sm_90", ranks=ranks)
    return plan.report().token_bytes[1], plan.resident_bytes


def rest(job: Job) -> tuple[float, float]:
    """Microseconds of a step beyond its bytes: least and most, see above."""
    steps = MEASURED["steps"]
    known = steps[job.recipe]
    taken, read = known.get(f"{job.batch}x{job.prompt}") or known[f"{job.batch}x128"]
    one = 1e3 * (taken - read / steps["limit_tb_s"])
    by_layers = one * job.config.num_hidden_layers / steps["layers"]
    by_bytes = one * bytes_of(job.model, job.recipe, job.ranks)[0] / steps["weights"][job.recipe]
    return min(by_layers, by_bytes), max(by_layers, by_bytes)


def sum_of(way: str, ranks: int, size: int) -> float:
    """Microseconds of an all-reduce of so many bytes.

    Between two sizes that were measured the logarithms are interpolated; above the last the time goes with the size.
    """
    about = MEASURED["sums"][way]
    if "start" in about:
        per_us = about["gb_s"] * 1e3  # bytes
        one_shot = about["start"] + size / per_us
        two_shot = 2 * (about["start"] + size / ranks / per_us)
        return float(min(one_shot, two_shot))
    points = sorted((int(at), float(taken)) for at, taken in about[str(ranks)].items())
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return math.exp(math.log(first) + part * (math.log(last) - math.log(first)))
    return points[-1][1] * size / points[-1][0]


def between(job: Job) -> float:
    """Microseconds of a step in which ranks exchange: sums, and the logits."""
    if job.ranks == 1:
        return 0.0
    size = 2 * job.batch * job.config.hidden_size
    sums = (2 * job.config.num_hidden_layers + 1) * sum_of(job.about["sums"], job.ranks, size)
    gather = job.about["gather"]
    part = 2 * job.batch * job.config.vocab_size / job.ranks  # bytes from each other rank
    streams = 1 if job.about["sums"] == "links" else job.ranks - 1  # that share a link
    return float(sums + gather["start"] + part * streams / (gather["gb_s"] * 1e3))


def rates(job: Job) -> tuple[float, float] | None:
    """Tokens a second of all sequences together, the lower and the higher end; None where they do not fit."""
    if not job.fits:
        return None
    read = bytes_of(job.model, job.recipe, job.ranks)[0] + job.cached(job.prompt + NEW // 2)
    fixed = read / (job.about["limit_tb_s"] * 1e6) + between(job)
    low, high = rest(job)
    return 1e6 * job.batch / (fixed + high), 1e6 * job.batch / (fixed + low)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row for each machine, model, recipe, batch and prompt."""
    table = Table("Tokens a second, projected")
    names = product(asked.machines, asked.models, asked.recipes, asked.batches, asked.prompts)
    for machine, model, recipe, batch, prompt in names:
        row: dict[str, Any] = {"GPU": machine, "model": model, "recipe": recipe, "batch": batch, "prompt": prompt}
        for ranks in RANKS:
            found = rates(Job(machine, model, recipe, batch, prompt, ranks))
            ends = dict.fromkeys(f"{one:,.0f}" for one in found or ())
            row[f"on {ranks}"] = " to ".join(ends) or NO_ROOM
        table.add(row)
    return {"rows": table.rows}
