"""This CPU through stock generate(): the original, the patched models and llama.cpp beside them, all in one run.

    python scripts/compare_cpu.py [--gguf FILE] [--model NAME_OR_FOLDER] [--new 128] [--repeats 7] [--plot FILE]

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.read_limit import read_limit
from accelpatch.kernels.cpu import native_library

PROMPT = "The history of the bicycle begins in the nineteenth century, when a baron from the south of Germany"
RECIPES = ("int8", "int4")
PREFILL = 512
FTYPE_Q8_0 = 7  # LLAMA_FTYPE_MOSTLY_Q8_0


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
    decoded: list[float] = field(default_factory=list)
    prefilled: list[float] = field(default_factory=list)


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
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))

    return Engine(name, size, lambda: -run(prompt, 1) + run(prompt, new), lambda: run(long, 1), resident_bytes(model))


def ours(arguments: argparse.Namespace) -> Iterator[tuple[Engine, list[int]]]:
    """The original and the patched models, and the prompt's ids."""
    for recipe in (None, *RECIPES):
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


def table(
    engines: list[Engine], rates: Callable[[Engine], list[float]], extra: dict[str, Callable[[Engine], str]]
) -> None:
    """Median rate with spread, the extra columns, and the median's ratio to each peer."""
    median = {engine.name: statistics.median(rates(engine)) for engine in engines}
    peers = [engine.name for engine in engines if not engine.name.startswith("accelpatch")]
    heads = ["engine", "tokens/s, median", "slowest to fastest", *extra, *(f"x {name}" for name in peers)]
    print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for engine in engines:
        found = rates(engine)
        cells = [engine.name, f"{median[engine.name]:.1f}", f"{min(found):.1f} to {max(found):.1f}"]
        cells += [column(engine) for column in extra.values()]
        print("| " + " | ".join([*cells, *(f"{median[engine.name] / median[peer]:.2f}" for peer in peers)]) + " |")


def show(engines: list[Engine], new: int, limit: float) -> None:
    """The two tables."""

    def share(engine: Engine) -> str:
        return f"{statistics.median((new - 1) / taken for taken in engine.decoded) * engine.bytes / limit:.0%}"

    columns: dict[str, Callable[[Engine], str]] = {
        "MB a token": lambda e: f"{e.bytes / 1e6:.0f}",
        "of the read limit": share,
    }
    columns["resident, of float32"] = lambda e: f"{e.resident / engines[0].resident:.3f}"
    columns["patch and verify, s"] = lambda e: "" if e.patch_seconds is None else f"{e.patch_seconds:.1f}"
    print(f"\nDecode, {new} new tokens:")
    table(engines, lambda engine: [(new - 1) / taken for taken in engine.decoded], columns)
    print(f"\nPrefill, a prompt of {PREFILL}:")
    table(engines, lambda engine: [PREFILL / taken for taken in engine.prefilled], {})


def draw(engines: list[Engine], new: int, title: str, path: Path) -> None:
    """Bars of both medians, from slowest to fastest as whiskers."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.2), layout="constrained")
    pictures = {
        f"decode, {new} tokens": lambda e: [(new - 1) / taken for taken in e.decoded],
        f"prefill, {PREFILL} tokens": lambda e: [PREFILL / taken for taken in e.prefilled],
    }
    names = [engine.name.replace("SmolLM2-135M-Instruct.", "").replace("Q4_1-to-", "") for engine in engines]
    colors = ["#d1495b" if name.startswith("accelpatch") else "#9aa5b1" for name in names]
    for axes, (label, rates) in zip(figure.subplots(1, 2, sharey=True), pictures.items(), strict=True):
        found = [rates(engine) for engine in engines]
        medians = [statistics.median(one) for one in found]
        spread = [[m - min(one) for m, one in zip(medians, found, strict=True)]]
        spread.append([max(one) - m for m, one in zip(medians, found, strict=True)])
        bars = axes.barh(names, medians, xerr=spread, capsize=3, color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=14)
        axes.set_title(f"{label}: tokens/s", fontsize=10)
        axes.margins(x=0.2)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def measure(engines: list[Engine], repeats: int) -> list[float]:
    """Every engine in turn, `repeats` times after one to warm up; returns the read limits in bytes a second."""
    limits = []
    for repeat in range(repeats + 1):
        limits.append(read_limit(torch.device("cpu")).bytes_per_second)
        for engine in engines:
            decoded, prefilled = engine.decode(), engine.prefill()
            if repeat:
                engine.decoded.append(decoded)
                engine.prefilled.append(prefilled)
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="Run llama.cpp with this file too.")
    parser.add_argument("--model", default="smollm2-135m", help="A model's name or folder (default: %(default)s).")
    parser.add_argument("--new", type=int, default=128, help="Tokens to generate (default: %(default)s).")
    parser.add_argument("--repeats", type=int, default=7, help="Timed turns of each engine (default: %(default)s).")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(),
                        help="Threads of every engine (default: as many as torch takes).")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE",
                        help="Draw both tables into this .png or .svg. It needs matplotlib.")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.gguf and util.find_spec("llama_cpp") is None:
        sys.exit("--gguf needs llama.cpp: pip install llama-cpp-python (it is built from source, which takes minutes)")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(ours(arguments))
        engines, prompt = [engine for engine, _ in pairs], pairs[0][1]
        if arguments.gguf:
            for file in (arguments.gguf, to_q8_0(arguments.gguf, Path(folder) / f"{arguments.gguf.stem}-to-Q8_0.gguf")):
                engines.append(llama_cpp(file, prompt, arguments.new))
        limits = measure(engines, arguments.repeats)
    packages = ["torch", "transformers", *(["llama-cpp-python"] if arguments.gguf else [])]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    print(f"\n{native_library.describe()}, {arguments.threads} threads, {versions}")
    print(f"batch 1, prompt of {len(prompt)} tokens, median of {arguments.repeats}")
    print(f"read limit {max(limits) / 1e9:.1f} GB/s, the fastest of this run (lowest {min(limits) / 1e9:.1f})")
    show(engines, arguments.new, max(limits))
    if arguments.plot:
        machine = f"{native_library.describe()}, {arguments.threads} threads"
        draw(engines, arguments.new, f"{Path(arguments.model).name}, batch 1, {machine}", arguments.plot)


if __name__ == "__main__":
    main()
