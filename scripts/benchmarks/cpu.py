"""This CPU through stock generate(): the original, the patched models and llama.cpp beside them, all in one run.

    python scripts/bench.py cpu [--gguf FILE] [--model NAME_OR_FOLDER] [--new 128] [--repeats 7] [--plot FILE]

Batch 1, greedy, the same prompt and `--new` tokens for all; engines take turns. A call for one token is taken off each
call of generate(). llama.cpp runs FILE, and FILE converted to Q8_0 by its own quantiser, through llama-cpp-python
(installed by hand: its build takes minutes), in its lowest loop: eval and sample. Before anything is timed each
patched model is verified, and its greedy answer printed. Shares are of the read limit of this same run.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor, nn

import accelpatch
from accelpatch.bench import plot
from accelpatch.bench.read_limit import read_limit
from accelpatch.kernels.cpu import native_library
from scripts.benchmarks.engines import in_turn, plain
from scripts.benchmarks.harness import Option, common, table

PROMPT = "The history of the bicycle begins in the nineteenth century, when a baron from the south of Germany"
PREFILL = 512
FTYPE_Q8_0 = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
CASES = (None, "int8", "int4")  # recipes; None: the original
OPTIONS = (
    *common(device="cpu", repeats=7),
    Option("model", "smollm2-135m", "A model's name or folder."), Option("new", 128, "Tokens to generate."),
    Option("gguf", None, "Run llama.cpp with this file too.", kind=Path, metavar="FILE"),
    Option("threads", torch.get_num_threads(), "Threads of every engine."),
    Option("plot", None, "Draw both tables into this .png or .svg. It needs matplotlib.", kind=Path, metavar="FILE"),
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


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def through_generate(name: str, model: Any, prompt: Tensor, new: int, size: int) -> Engine:
    """Stock generate() of an original or patched model."""
    long = torch.randint(prompt.max().item(), (1, PREFILL), generator=torch.Generator().manual_seed(0))

    def run(ids: Tensor, count: int) -> float:
        return seconds(lambda: plain(model, ids, count))

    return Engine(name, size, lambda: -run(prompt, 1) + run(prompt, new), lambda: run(long, 1), resident_bytes(model))


def ours(arguments: argparse.Namespace) -> Iterator[tuple[Engine, list[int]]]:
    """The original and the patched models, and the prompt's ids."""
    for recipe in CASES:
        loaded = accelpatch.load(arguments.model, dtype="float32")
        model: Any = loaded.model
        ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        name, size, taken = "HF eager float32", sum(parameter.nbytes for parameter in model.parameters()), None
        if recipe:
            native_library.native()  # built, or found in the cache
            begun = time.perf_counter()
            report = accelpatch.patch(model, recipe, keep_original="none").accelpatch.report()
            taken = time.perf_counter() - begun
            name, size = f"accelpatch {recipe}", report.token_bytes[1]
            answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
            print(f"{recipe}: {report.replaced} of {len(report.sites)} sites; {report.verification}")
            print(f"{recipe}: ...{loaded.tokenizer.decode(answer)!r}")
        engine = through_generate(name, model, ids, arguments.new, size)
        engine.patch_seconds = taken
        yield engine, ids[0].tolist()


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
    long = [token % 1000 + 100 for token in range(PREFILL)]

    def start(tokens: list[int]) -> None:
        engine.reset()
        engine.eval(tokens)

    def decode() -> float:
        start(prompt)
        begun = time.perf_counter()
        for _ in range(new - 1):
            engine.eval([engine.sample(temp=0.0)])
        return time.perf_counter() - begun

    size = sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)
    return Engine(f"llama.cpp {file.stem}", size, decode, lambda: seconds(lambda: start(long)), size)


def rows(engines: Sequence[Engine], rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Median rate with its spread, and its ratio to each peer."""
    median = {name: statistics.median(found) for name, found in rates.items()}
    peers = [engine.name for engine in engines if not engine.name.startswith("accelpatch")]
    return [
        {"engine": one.name, "tok/s": median[one.name],
         "slowest to fastest, tok/s": (min(rates[one.name]), max(rates[one.name])),
         **{f"times {peer}": median[one.name] / median[peer] for peer in peers}}
        for one in engines
    ]  # fmt: skip


def draw(pictures: dict[str, dict[str, list[float]]], title: str, path: Path) -> None:
    """Bars of both medians, from slowest to fastest as whiskers."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (label, rates) in zip(figure.subplots(1, 2, sharey=True), pictures.items(), strict=True):
        names = [name.replace("SmolLM2-135M-Instruct.", "").replace("Q4_1-to-", "") for name in rates]
        colors = [plot.COLORS["patched" if name.startswith("accelpatch") else "original"] for name in names]
        medians = [statistics.median(one) for one in rates.values()]
        ends = [(m - min(one), max(one) - m) for m, one in zip(medians, rates.values(), strict=True)]
        bars = axes.barh(names, medians, xerr=list(zip(*ends, strict=True)), capsize=3, color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=14)
        axes.set_title(f"{label}: tokens/s", fontsize=10)
        axes.margins(x=0.2)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Every engine in turn after one turn to warm up, and the read limit in each."""
    if asked.gguf and util.find_spec("llama_cpp") is None:
        sys.exit("--gguf needs llama.cpp: pip install llama-cpp-python (it is built from source, which takes minutes)")
    torch.set_num_threads(asked.threads)
    limits: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(ours(asked))
        engines, prompt = [engine for engine, _ in pairs], pairs[0][1]
        if asked.gguf:
            for file in (asked.gguf, to_q8_0(asked.gguf, Path(folder) / f"{asked.gguf.stem}-to-Q8_0.gguf")):
                engines.append(llama_cpp(file, prompt, asked.new))
        calls: dict[str, Callable[[], Any]] = {
            "": lambda: limits.append(read_limit(torch.device("cpu")).bytes_per_second)
        } | {one.name: lambda one=one: (one.decode(), one.prefill()) for one in engines}
        found = in_turn(calls, asked.repeats, 1)
    limit, machine = max(limits), f"{native_library.describe()}, {asked.threads} threads"
    print(f"\n{machine}; read limit {limit / 1e9:.1f} GB/s, the fastest of this run (lowest {min(limits) / 1e9:.1f})")
    decode = {one.name: [(asked.new - 1) / taken for taken, _ in found[one.name]] for one in engines}
    prefill = {one.name: [PREFILL / taken for _, taken in found[one.name]] for one in engines}
    beside = [
        {"MB a token": e.bytes / 1e6, "share of the read limit": statistics.median(decode[e.name]) * e.bytes / limit,
         "resident, of float32": e.resident / engines[0].resident,
         "patch and verify, s": e.patch_seconds} for e in engines
    ]  # fmt: skip
    about = f"batch 1, prompt of {len(prompt)} tokens, median of {asked.repeats} after 1 to warm up"
    decoded = [row | more for row, more in zip(rows(engines, decode), beside, strict=True)]
    made = {"decode": table(decoded, f"decode, {asked.new} new tokens, {about}")}
    made["prefill"] = table(rows(engines, prefill), f"prefill, a prompt of {PREFILL}, {about}")
    if asked.plot:
        pictures = {f"decode, {asked.new} tokens": decode, f"prefill, {PREFILL} tokens": prefill}
        draw(pictures, f"{Path(asked.model).name}, batch 1, {machine}", asked.plot)
    return made | {"read_limits": limits}
