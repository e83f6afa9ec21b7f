"""This CPU through stock generate(): the original, the patched models and llama.cpp beside them, all in one run.

Batch 1, greedy, the same prompt and `--new` tokens for all; engines take turns. A call for one token is taken off each
call of generate(). llama.cpp runs the file of --gguf, and that file converted to Q8_0 by its own quantiser, through
llama-cpp-python (installed by hand: its build takes minutes), in its lowest loop: eval and sample. Before anything is
timed each patched model is verified, and its greedy answer printed. Shares are of the read limit of this same run.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import nn

import accelpatch
from accelpatch.bench import plot
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import once
from accelpatch.kernels.cpu import native_library
from scripts.benchmarks.engines import in_turn, plain, turns
from scripts.benchmarks.harness import PLOT, Option, bars, common, table

PROMPT = "The history of the bicycle begins in the nineteenth century, when a baron from the south of Germany"
PREFILL, CPU = 512, torch.device("cpu")
FTYPE_Q8_0 = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
CASES = (None, "int8", "int4")  # recipes; None: the original
OPTIONS = (
    *common(device="cpu", repeats=7),
    Option("model", "smollm2-135m", "A model's name or folder."), Option("new", 128, "Tokens to generate."),
    Option("gguf", None, "Run llama.cpp with this file too.", kind=Path, metavar="FILE"),
    Option("threads", torch.get_num_threads(), "Threads of every engine."), PLOT,
)  # fmt: skip


@dataclass
class Engine:
    """decode: seconds of all new tokens but the first. prefill: seconds of a prompt of PREFILL tokens.

    bytes: read for a token. resident: of the tensors that are held.
    """

    name: str
    bytes: int
    decode: Callable[[], float]
    prefill: Callable[[], float]
    resident: int
    patch_seconds: float | None = None


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all storages behind the model's parameters, buffers and quantised weights, each counted once."""
    layouts = [layout for module in model.modules() if (layout := getattr(module, "layout", None)) is not None]
    held = [*model.parameters(), *model.buffers(), *(layout.w for layout in layouts)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


def ours(asked: argparse.Namespace) -> Iterator[tuple[Engine, list[int]]]:
    """The original and the patched models, and the prompt's ids."""
    for recipe in CASES:
        loaded = accelpatch.load(asked.model, dtype="float32")
        model: Any = loaded.model
        ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        name, size, taken = "HF eager float32", sum(parameter.nbytes for parameter in model.parameters()), None
        if recipe:
            native_library.native()  # built, or found in the cache
            taken = once(partial(accelpatch.patch, model, recipe, keep_original="none"), CPU)
            report = model.accelpatch.report()
            name, size = f"accelpatch {recipe}", report.token_bytes[1]
            answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
            print(f"{recipe}: {report.replaced} of {len(report.sites)} sites; {report.verification}")
            print(f"{recipe}: ...{loaded.tokenizer.decode(answer)!r}")
        long = torch.randint(ids.max().item(), (1, PREFILL), generator=torch.Generator().manual_seed(0))
        short, every, prompt = (
            partial(once, partial(plain, model, *given), CPU) for given in ((ids, 1), (ids, asked.new), (long, 1))
        )
        decode = partial(lambda short, every: -short() + every(), short, every)
        yield Engine(name, size, decode, prompt, resident_bytes(model), taken), ids[0].tolist()


def to_q8_0(source: Path, target: Path) -> Path:
    """`source` with all its matrices in Q8_0, by llama.cpp's quantiser."""
    library: Any = import_module("llama_cpp")
    options = library.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = FTYPE_Q8_0, True
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        sys.exit(f"llama.cpp could not convert {source}")
    return target


def llama_cpp(file: Path, prompt: list[int], new: int) -> Engine:
    """llama.cpp's own loop over the same tokens."""
    threads = torch.get_num_threads()
    options = {"n_ctx": 1024, "n_batch": PREFILL, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    engine: Any = import_module("llama_cpp").Llama(model_path=str(file), **options)

    def start(tokens: list[int]) -> None:
        engine.reset()
        engine.eval(tokens)

    def decode() -> float:
        start(prompt)
        begun = time.perf_counter()
        for _ in range(new - 1):
            engine.eval([engine.sample(temp=0.0)])
        return time.perf_counter() - begun

    long = [token % 1000 + 100 for token in range(PREFILL)]
    size = sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)
    return Engine(f"llama.cpp {file.stem}", size, decode, partial(once, partial(start, long), CPU), size)


def rows(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Median rates with their spread, and their ratios to each peer."""
    median = {name: statistics.median(found) for name, found in rates.items()}
    peers = [name for name in rates if not name.startswith("accelpatch")]
    return [
        {"engine": name, "tok/s": median[name], "slowest to fastest, tok/s": (min(found), max(found)),
         **{f"times {peer}": median[name] / median[peer] for peer in peers}}
        for name, found in rates.items()
    ]  # fmt: skip


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Every engine in turn after one turn to warm up, and the read limit in each."""
    if asked.gguf and util.find_spec("llama_cpp") is None:
        sys.exit("--gguf needs llama.cpp: pip install llama-cpp-python (it is built from source, which takes minutes)")
    if asked.plot:
        plot.check(asked.plot)
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(ours(asked))
        engines, prompt = [engine for engine, _ in pairs], pairs[0][1]
        if asked.gguf:
            for file in (asked.gguf, to_q8_0(asked.gguf, Path(folder) / f"{asked.gguf.stem}-to-Q8_0.gguf")):
                engines.append(llama_cpp(file, prompt, asked.new))
        calls: dict[str, Callable[[], Any]] = {"": lambda: read_limit(CPU).bytes_per_second}
        calls |= {one.name: lambda one=one: (one.decode(), one.prefill()) for one in engines}
        found = in_turn(calls, asked.repeats, 1)
    limits = found.pop("")
    limit, machine = max(limits), f"{native_library.describe()}, {asked.threads} threads"
    print(f"\n{machine}; read limit {limit / 1e9:.1f} GB/s, the fastest of this run (lowest {min(limits) / 1e9:.1f})")
    decode = {name: [(asked.new - 1) / taken for taken, _ in one] for name, one in found.items()}
    prefill = {name: [PREFILL / taken for _, taken in one] for name, one in found.items()}
    decoded = [
        row | {"MB a token": e.bytes / 1e6, "share of the read limit": row["tok/s"] * e.bytes / limit,
               "resident, of float32": e.resident / engines[0].resident, "patch and verify, s": e.patch_seconds}
        for row, e in zip(rows(decode), engines, strict=True)
    ]  # fmt: skip
    about = f"batch 1, prompt of {len(prompt)} tokens, {turns(asked.repeats, 1)}"
    made = {"decode": table(decoded, f"decode, {asked.new} new tokens, {about}")}
    made["prefill"] = table(rows(prefill), f"prefill, a prompt of {PREFILL}, {about}")
    if asked.plot:
        panels = {f"decode, {asked.new} tokens, tokens/s": decode, f"prefill, {PREFILL} tokens, tokens/s": prefill}
        bars(panels, f"{Path(asked.model).name}, batch 1, {machine}", asked.plot, "accelpatch")
    return made | {"read_limits": limits}
