"""A training step of LoRA adapters (PEFT, rank 16, all linear layers): forward, backward and AdamW over the adapters.

On a GPU each engine has its model alone, with gradient checkpointing: seconds, the memory of the weights before the
first step, and the peak over all steps of a case. On a CPU, without checkpointing, the engines take turns, and the time
is that of the process on all its threads, which other programs on the machine lengthen less than they do seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import accelpatch
from accelpatch.bench.timing import measure
from scripts.benchmarks.engines import allocated, freed, in_turn, random_model, turns
from scripts.benchmarks.harness import TINY, Case, Option, Table, cases, common

Found = dict[str, Any]


def in_bitsandbytes(model: Any) -> Any:
    """`model` with bitsandbytes' nf4 in its linear layers but the head, as its QLoRA configuration has them."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and not name.endswith("lm_head"):
            options: Any = {"compute_dtype": layer.weight.dtype, "compress_statistics": True, "quant_type": "nf4"}
            packed = Linear4bit(layer.in_features, layer.out_features, bias=False, device="meta", **options)
            packed.weight = Params4bit(layer.weight.data.cpu(), False, compress_statistics=True, quant_type="nf4")
            model.set_submodule(name, packed.to(next(model.parameters()).device))
    return model


def model_of(engine: str, asked: argparse.Namespace) -> Any:
    """A model of its own for each engine."""
    model = random_model(asked)
    if engine == "unpatched":
        return model
    return in_bitsandbytes(model) if engine == "bitsandbytes" else accelpatch.patch(model, engine)


def step_of(model: Any, *, checkpointing: bool) -> Callable[[Tensor], None]:
    """One step over ids[B, L], of a model that gets adapters here."""
    from peft import LoraConfig, get_peft_model

    model.config.use_cache = False
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    some = [one for one in adapted.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(some, lr=1e-4)

    def step(ids: Tensor) -> None:
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cpu_time(call: Callable[[], None]) -> float:
    """Seconds that all threads of this process ran in a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def by_turns(engines: list[str], asked: argparse.Namespace) -> Found:
    """A row for each engine and case. times: of the first engine's steps in the same turns, the median and the ends of
    the middle half."""
    models = {engine: model_of(engine, asked) for engine in engines}
    steps = {engine: step_of(model, checkpointing=False) for engine, model in models.items()}
    printed = Table(f"{asked.model}, LoRA of rank 16, {turns(asked.repeats, 2)}, {torch.get_num_threads()} threads")
    for case in asked.cases:
        ids = case.ids(models[engines[0]])
        calls = {engine: partial(cpu_time, partial(step, ids)) for engine, step in steps.items()}
        found = in_turn(calls, asked.repeats, 2, alternating=True)
        for engine, every in found.items():
            ratios = [one / first for one, first in zip(every, found[engines[0]], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            printed.add({"engine": engine, "sequences": f"{case.batch}x{case.prompt}",
                         "CPU time, ms": 1e3 * statistics.median(every), "times": median,
                         "middle half": (low, high)})  # fmt: skip
    return {"rows": printed.rows}


def one_by_one(engines: list[str], asked: argparse.Namespace) -> Found:
    """A row for each engine and case; each engine has its model anew, so that the memory is its own."""
    device, printed = torch.device(asked.device), Table(f"{asked.model}, LoRA of rank 16, gradient checkpointing")
    for engine in engines:
        model = model_of(engine, asked)
        step, weights = step_of(model, checkpointing=True), allocated(device)
        for case in asked.cases:
            torch.cuda.reset_peak_memory_stats(device)
            timed = measure(partial(step, case.ids(model)), device=device, repeats=asked.repeats, warmup=2)
            printed.add({"engine": engine, "sequences": f"{case.batch}x{case.prompt}", "step, ms": 1e3 * timed.median,
                         "spread": timed.spread, "weights, GB": weights,
                         "peak, GB": allocated(device, peak=True)})  # fmt: skip
        del model, step
        freed()
    return {"rows": printed.rows}


def run(asked: argparse.Namespace) -> Found:
    """Leaves bitsandbytes out where it is not installed."""
    engines = [one for one in asked.engines if one != "bitsandbytes" or find_spec(one) is not None]
    for engine in set(asked.engines) - set(engines):
        print(f"{engine} is not installed: left out", flush=True)
    if not engines:
        return {"rows": []}
    alone = torch.device(asked.device).type == "cuda" and not asked.tiny
    return one_by_one(engines, asked) if alone else by_turns(engines, asked)


OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16", repeats=5),
    cases([Case(1, 512, 1), Case(1, 2048, 1), Case(4, 2048, 1)]), TINY,
    Option("engines", ["unpatched", "bitsandbytes", "train", "int8"], "Unpatched, bitsandbytes' nf4, or recipes."),
)  # fmt: skip
