"""Decode through stock generate(), before and after a patch, and llama.cpp beside it: one run, engines in turn.

    python scripts/compare_llama_cpp.py [--gguf FILE] [--model NAME_OR_FOLDER] [--new 128] [--repeats 7] [--threads 2]

Batch 1, greedy, the same prompt of some 20 tokens and `--new` tokens for all. The original and the models patched with
int8 and int4 run generate(); a call for one token is taken off each. llama.cpp runs FILE, and FILE converted to Q8_0
by its own quantiser, through llama-cpp-python (installed by hand: its build takes minutes), in its lowest loop: eval
and sample. Shares are of the read limit of this same run. compare_cpu.py times the native steps with no generate()
around them.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gguf import GGUFReader

import accelpatch
from accelpatch.bench.read_limit import read_limit
from accelpatch.device import probe
from scripts.compare_cpu import Engine, hugging_face, llama_cpp

PROMPT = "The history of the bicycle begins in the nineteenth century, when a baron from the south of Germany"
RECIPES = ("int8", "int4")
FTYPE_Q8_0 = 7  # LLAMA_FTYPE_MOSTLY_Q8_0


def to_q8_0(source: Path, target: Path) -> Path:
    """`source` with all its matrices in Q8_0, by llama.cpp's quantiser."""
    library: Any = import_module("llama_cpp")
    options = library.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = FTYPE_Q8_0, True
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        sys.exit(f"llama.cpp could not convert {source}")
    return target


def tensor_bytes(file: Path) -> int:
    """Bytes of a GGUF file's tensors: what a token reads where the embedding is the head too."""
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)


def ours(arguments: argparse.Namespace) -> Iterator[tuple[Engine, list[int]]]:
    """The original and the patched models, and the prompt's ids."""
    for recipe in (None, *RECIPES):
        loaded = accelpatch.load(arguments.model, dtype="float32")
        model: Any = loaded.model
        ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        name, size = "HF eager float32", sum(parameter.nbytes for parameter in model.parameters())
        if recipe:
            report = accelpatch.patch(model, recipe, keep_original="none").accelpatch.report()
            name, size = f"accelpatch {recipe}", report.token_bytes[1]
            print(f"{recipe}: {report.replaced} of {len(report.sites)} sites; {report.verification}")
        yield Engine(name, size, hugging_face(model, ids, arguments.new)), ids[0].tolist()


def peers(file: Path, folder: Path, prompt: list[int], new: int) -> Iterator[Engine]:
    """llama.cpp on `file` and on its Q8_0 conversion."""
    for path in (file, to_q8_0(file, folder / f"{file.stem}-to-Q8_0.gguf")):
        yield Engine(f"llama.cpp {path.stem}", tensor_bytes(path), llama_cpp(str(path), prompt, new))


def show(engines: Sequence[Engine], rates: dict[str, list[float]], limit: float) -> None:
    """The table: median tokens a second with spread, share of the limit, and the median's ratio to each peer."""
    median = {name: statistics.median(found) for name, found in rates.items()}
    others = [engine.name for engine in engines if not engine.name.startswith("accelpatch")]
    heads = ["engine", "tok/s, median", "slowest to fastest", "MB a token", "of the read limit"]
    print("| " + " | ".join([*heads, *(f"x {name}" for name in others)]) + " |")
    print("|---" * (len(heads) + len(others)) + "|")
    for engine in engines:
        found = rates[engine.name]
        share = median[engine.name] * engine.bytes / limit
        cells = [engine.name, f"{median[engine.name]:.1f}", f"{min(found):.1f} to {max(found):.1f}"]
        cells += [f"{engine.bytes / 1e6:.0f}", f"{share:.0%}"]
        print("| " + " | ".join([*cells, *(f"{median[engine.name] / median[name]:.2f}" for name in others)]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if arguments.gguf and util.find_spec("llama_cpp") is None:
        sys.exit("--gguf needs llama.cpp: pip install llama-cpp-python (it is built from source, which takes minutes)")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(ours(arguments))
        running, prompt = [engine for engine, _ in pairs], pairs[0][1]
        if arguments.gguf:
            running += peers(arguments.gguf, Path(folder), prompt, arguments.new)
        rates: dict[str, list[float]] = {engine.name: [] for engine in running}
        limits = []
        for repeat in range(arguments.repeats + 1):
            limits.append(read_limit(torch.device("cpu")).bytes_per_second)
            for engine in running:
                seconds = engine.run()
                if repeat:  # the first warms up
                    rates[engine.name].append((arguments.new - 1) / seconds)
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    versions += [f"llama-cpp-python {metadata.version('llama-cpp-python')}"] if arguments.gguf else []
    print(f"\n{probe('cpu').name}, {arguments.threads} threads, {', '.join(versions)}")
    print(f"batch 1, prompt of {len(prompt)} tokens, {arguments.new} new tokens, median of {arguments.repeats}")
    print(f"read limit {max(limits) / 1e9:.1f} GB/s, the fastest of this run (lowest {min(limits) / 1e9:.1f})\n")
    show(running, rates, max(limits))


if __name__ == "__main__":
    main()
