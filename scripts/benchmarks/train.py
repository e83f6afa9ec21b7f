"""A training step of LoRA adapters (PEFT, rank 16, all linear layers, gradient checkpointing) around packed weights.

    python scripts/bench.py train [--model llama2-7b] [--cases 1x512 1x2048 4x2048] [--engines bf16 bitsandbytes train]

A step is the forward and backward pass of random ids and AdamW over the adapters. Engines: the unpatched model in bf16,
bitsandbytes' nf4 with double quantisation, and recipes. The model with its adapters is made anew for each engine, so
that the memory is its own: `weights` before the first step, `peak` over all steps of a case.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import accelpatch
from accelpatch import api
from accelpatch.bench.timing import measure
from scripts.benchmarks.harness import TINY, Case, Option, Table, cases, common, device_of

CASES = [Case(1, 512, 1), Case(1, 2048, 1), Case(4, 2048, 1)]
OPTIONS = (
    *common(model="llama2-7b", device=None, dtype="bfloat16", repeats=5), cases(CASES), TINY,
    Option("engines", ["bf16", "bitsandbytes", "train", "int8"], "What to time: bf16, bitsandbytes, or recipes."),
)  # fmt: skip
GB = 1e9


def model_of(asked: argparse.Namespace, engine: str) -> Any:
    """The model of an engine, with random weights, frozen."""
    device = device_of(asked)
    layers = {"layers": 2} if asked.tiny else {}
    model = api.random_model(asked.model, device=device, dtype=asked.dtype, **layers)
    if engine == "bitsandbytes":
        return in_bitsandbytes(model)
    return model if engine == "bf16" else accelpatch.patch(model, engine, progress=False)


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


def step_of(model: Any) -> Callable[[Tensor], None]:
    """One step over ids[B, L], of a model that gets adapters here."""
    from peft import LoraConfig, get_peft_model

    model.config.use_cache = False
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


def memory(device: torch.device, what: str) -> float | None:
    """Gigabytes in use, or at most since the last reset."""
    return getattr(torch.cuda, what)(device) / GB if device.type == "cuda" else None


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row for each engine and case."""
    device, rows = device_of(asked), Table(f"{asked.model}, LoRA of rank 16, gradient checkpointing")
    for engine in asked.engines:
        model = model_of(asked, engine)
        step, weights = step_of(model), memory(device, "memory_allocated")
        for case in asked.cases:
            ids = case.ids(model)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            timed = measure(partial(step, ids), device=device, repeats=asked.repeats, warmup=2)
            peak = memory(device, "max_memory_allocated")
            rows.add({"engine": engine, "sequences": f"{case.batch}x{case.prompt}", "step, ms": 1e3 * timed.median,
                      "spread": timed.spread, "weights, GB": weights, "peak, GB": peak})  # fmt: skip
        model = step = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows.rows}
