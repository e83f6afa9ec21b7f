"""Saving and loading of a patched model: seconds beside a plain read of the same files, and the peak of memory.

    python scripts/bench.py checkpoint [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipe int4]
        [--folder FOLDER]

Random weights. The files are dropped from the page cache before each reading; the second of two counts, when libraries
are loaded already. Quantising while loading is measured from a float checkpoint of the same shape; peaks are those of
torch's allocator on a GPU, of the process on a CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import accelpatch
from accelpatch.bench.timing import once
from accelpatch.models import load as loading
from scripts.benchmarks.engines import allocated, freed
from scripts.benchmarks.harness import Option, common, table

CASES = ("save", "load_file", "load", "quantise while loading")
OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16"),
    Option("recipe", "int4", "The recipe."),
    Option("folder", None, "Where the checkpoints are written. It is a temporary folder if not given.", kind=Path),
)


def drop_from_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for file in folder.iterdir():
        held = os.open(file, os.O_RDONLY)
        os.fsync(held)
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(held)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any, float]:
    """(seconds, what the call returned, GB at the peak)."""
    freed()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    made: list[Any] = []
    seconds = once(lambda: made.append(call()), device)
    peak = allocated(device, peak=True)
    return seconds, made[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 * 1.024 if peak is None else peak


def read(folder: Path, device: torch.device) -> list[Any]:
    """All tensors of a folder on the device, as safetensors reads them."""
    return [load_file(file, device=str(device)) for file in sorted(folder.glob("*.safetensors"))]


def loaded(folder: Path, device: torch.device, *recipe: str) -> Any:
    return accelpatch.load(str(folder), *recipe, device=device).model


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of a run."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    plain, saved = folder / "float", folder / "saved"
    model: Any = loading.random(asked.model, dtype=dtype, device=device)
    float_bytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(plain, max_shard_size="5GB")
    accelpatch.patch(model, asked.recipe, keep_original="none")
    ids = torch.arange(5, 69, device=device)[None]
    with torch.no_grad():
        due = model(ids).logits

    def same(made: Any) -> bool:
        with torch.no_grad():
            return bool(torch.equal(made(ids).logits, due))

    rows: list[dict[str, Any]] = [
        {"what": CASES[0], "taken, s": timed(partial(model.save_pretrained, saved), device)[0]}
    ]
    del model
    for name, call in ((CASES[1], partial(read, saved, device)), (CASES[2], partial(loaded, saved, device))):
        for _ in range(2):
            drop_from_cache(saved)
            seconds, made, peak = timed(call, device)
            row = {"what": name, "taken, s": seconds, "peak, GB": peak}
            if name == CASES[2]:
                row |= {"same logits": same(made), "times the read, less 1 s": (seconds - 1.0) / rows[1]["taken, s"]}
            del made
        rows.append(row)
    seconds, made, peak = timed(partial(loaded, plain, device, asked.recipe), device)
    size = made.accelpatch.report().resident_bytes[1]
    layer = max(p.nbytes for p in loading.from_config(asked.model).to(dtype).parameters())
    rows.append({"what": CASES[3], "taken, s": seconds, "peak, GB": peak, "same logits": same(made),
                 "peak, times the result and its largest weight": peak * 1e9 / (size + layer)})  # fmt: skip
    table(rows, f"{asked.model}, {asked.recipe}: result {size / 1e9:.2f} GB, float {float_bytes / 1e9:.2f} GB, "
                f"largest weight {layer / 1e9:.2f} GB")  # fmt: skip
    return {"rows": rows, "result": size, "float_bytes": float_bytes, "largest_weight": layer}


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """In a folder that goes."""
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        return measured(asked, Path(folder))
