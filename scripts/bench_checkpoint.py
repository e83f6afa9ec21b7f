"""Saving and loading of a patched model: seconds beside a plain read of the same files, and the peak of memory.

    python scripts/bench_checkpoint.py [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipe int4]
        [--folder FOLDER]

Random weights. `cold`: the files are dropped from the page cache before each reading. Quantising while loading is
measured from a float checkpoint of the same shape; peaks are those of torch's allocator on a GPU, of the process on a
CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.models import load as loading


def drop_from_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for file in folder.iterdir():
        held = os.open(file, os.O_RDONLY)
        os.fsync(held)
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(held)


def peak(device: torch.device) -> int:
    """Bytes at the peak so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """(seconds, what the call returned)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    made = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, made


def read(folder: Path, device: torch.device) -> list[Any]:
    """All tensors of a folder on the device, as safetensors reads them."""
    return [load_file(file, device=str(device)) for file in sorted(folder.glob("*.safetensors"))]


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of a run."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    plain, saved = folder / "float", folder / "saved"
    model = loading.random(asked.model, dtype=dtype, device=device)
    float_bytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(plain, max_shard_size="5GB")
    accelpatch.patch(model, asked.recipe, keep_original="none")
    ids = torch.arange(5, 69, device=device)[None]
    with torch.no_grad():
        due = model(ids).logits
    found: dict[str, Any] = {"save_s": timed(partial(model.save_pretrained, saved), device)[0]}
    del model
    for name, call in (
        ("load_file_s", lambda: read(saved, device)),
        ("load_s", lambda: accelpatch.load(str(saved), device=device).model),
    ):
        for _ in range(2):  # the second time, libraries are loaded already
            drop_from_cache(saved)
            found[name], made = timed(call, device)
            if name == "load_s":
                with torch.no_grad():
                    found["same_logits"] = bool(torch.equal(made(ids).logits, due))
                found["load_peak"] = peak(device)
            del made
    found["load_over_read"] = (found["load_s"] - 1.0) / found["load_file_s"]
    found["while_loading_s"], made = timed(
        lambda: accelpatch.load(str(plain), asked.recipe, device=device).model, device
    )
    found["while_loading_peak"], report = peak(device), made.accelpatch.report()
    found["result"] = report.resident_bytes[1]
    layer = max(p.nbytes for p in loading.from_config(asked.model).to(dtype).parameters())
    found["peak_over_result_and_layer"] = found["while_loading_peak"] / (found["result"] + layer)
    with torch.no_grad():
        found["while_loading_same_logits"] = bool(torch.equal(made(ids).logits, due))
    return found | {"float_bytes": float_bytes, "largest_weight": layer}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="The model whose shape is used (default: %(default)s).")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="The device to run on."
    )
    parser.add_argument("--dtype", default="bfloat16", help="The type of the float weights (default: %(default)s).")
    parser.add_argument("--recipe", default="int4", help="The recipe (default: %(default)s).")
    parser.add_argument("--folder", type=Path, help="Where the checkpoints are written (default: a temporary folder).")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        print(json.dumps(measured(asked, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
