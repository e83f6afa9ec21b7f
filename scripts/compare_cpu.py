"""Decode speed on this CPU, all in one run: Hugging Face eager, the native step in int8 and int4, llama.cpp if there.

    python scripts/compare_cpu.py [--model NAME_OR_FOLDER] [--new 128] [--repeats 5] [--gguf FILE ...]

Every engine decodes `--new` tokens greedily after the same prompt, in turn, with torch's number of threads. The native
steps are first checked against the model with their weights: over red no table is printed. Shares are of the read
limit that was measured in the same run. --gguf: files for llama.cpp (llama-cpp-python, to be installed by hand).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelpatch.kernels import cpu_native
from accelpatch.kernels.cpu_step import DecodeStep
from accelpatch.models import load
from tests.kernels.cpu.stepping import FORMATS, build, rounded

PROMPT = "What is the capital of France?"
LIMIT_BYTES = 1 << 28
NATIVE = ("int8", "int4")


@dataclass(frozen=True)
class Engine:
    """run: decodes and gives the seconds of each repeat's new tokens. bytes: of weights a token reads; 0: not known."""

    name: str
    bytes: int
    run: Callable[[], float]


def weight_bytes(step: DecodeStep) -> int:
    """What a token reads of the step's weights."""
    return sum(pack.bytes for layer in step.layers for pack in layer.linears.values()) + step.head.bytes


def decode(step: DecodeStep, prompt: Tensor, new: int) -> tuple[list[int], float]:
    """The new tokens, and the seconds that all but the first took."""
    zero, logits, tokens = torch.zeros(1, dtype=torch.int64), torch.empty(1, step.shape.vocabulary), []
    for i, token in enumerate(prompt[0].tolist()):
        step(torch.tensor([token]), torch.tensor([i]), zero, torch.tensor([i]), logits)
    begun = time.perf_counter()
    for i in range(prompt.shape[1], prompt.shape[1] + new):
        token = logits.argmax(-1)
        tokens.append(int(token))
        if i + 1 < prompt.shape[1] + new:
            step(token, torch.tensor([i]), zero, torch.tensor([i]), logits)
    return tokens, time.perf_counter() - begun


def check(model: PreTrainedModel, step: DecodeStep, prompt: Tensor) -> None:
    """Exit unless the step gives the logits of the model with its weights."""
    found = torch.empty(1, step.shape.vocabulary)
    for i, token in enumerate(prompt[0].tolist()):
        at = torch.tensor([i])
        step(torch.tensor([token]), at, torch.zeros_like(at), at, found)
    with torch.inference_mode():
        due = rounded(copy.deepcopy(model), step, torch.float32)(prompt).logits[0, -1]
    error = float((found[0] - due).norm() / due.norm())
    if not error < 1e-5:
        sys.exit(f"the native step's logits are off by {error:.2g}: no table")


def hugging_face(model: PreTrainedModel, prompt: Tensor, new: int) -> Callable[[], float]:
    """Stock generate(), the prompt's part taken off by a call for one token."""

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - begun

    return lambda: -seconds(1) + seconds(new)


def llama_cpp(file: str, prompt: list[int], new: int) -> Callable[[], float]:
    """llama.cpp's own loop over the same tokens."""
    threads = torch.get_num_threads()
    options = {"n_ctx": 1024, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    engine: Any = import_module("llama_cpp").Llama(model_path=file, **options)

    def run() -> float:
        engine.reset()
        engine.eval(prompt)
        begun = time.perf_counter()
        for _ in range(new - 1):
            engine.eval([engine.sample(temp=0.0)])
        return time.perf_counter() - begun

    return run


def engines(arguments: argparse.Namespace) -> Iterator[Engine]:
    """All that can run here."""
    loaded = load.load(arguments.model, dtype="float32")
    model = loaded.model
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt"
    )
    prompt = text["input_ids"] if not isinstance(text, Tensor) else text
    size = sum(parameter.nbytes for parameter in model.parameters())
    yield Engine("HF eager float32", size, hugging_face(model, prompt, arguments.new))
    for format_ in NATIVE:
        step = build(model, FORMATS[format_], 1, prompt.shape[1] + arguments.new)
        check(model, step, prompt)
        print(f"{format_}: {loaded.tokenizer.decode(decode(step, prompt, 24)[0], skip_special_tokens=True)!r}")
        yield Engine(f"native step {format_}", weight_bytes(step), lambda s=step: decode(s, prompt, arguments.new)[1])
    for file in arguments.gguf:
        run = llama_cpp(file, prompt[0].tolist(), arguments.new)
        yield Engine(f"llama.cpp {Path(file).name}", Path(file).stat().st_size, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gguf", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.gguf and util.find_spec("llama_cpp") is None:
        sys.exit("--gguf needs llama.cpp: pip install llama-cpp-python (it is built from source, which takes minutes)")
    running = list(engines(arguments))
    buffer = torch.ones(LIMIT_BYTES, dtype=torch.uint8)
    taken: dict[str, list[float]] = {engine.name: [] for engine in running}
    limits = []
    for _ in range(arguments.repeats):
        limits.append(cpu_native.read_limit(buffer))
        for engine in running:
            taken[engine.name].append(engine.run())
    print(f"\n{cpu_native.describe()}, {torch.get_num_threads()} threads; batch 1, {arguments.new} new tokens, greedy")
    print(f"read limit {max(limits):.1f} GB/s (fastest of {arguments.repeats})\n")
    print(
        "| engine | tok/s, median | slowest to fastest | MB a token | share of the read limit |\n|---|---|---|---|---|"
    )
    for engine in running:
        rates = sorted((arguments.new - 1) / seconds for seconds in taken[engine.name])
        share = statistics.median(rates) * engine.bytes / max(limits) / 1e9
        print(
            f"| {engine.name} | {statistics.median(rates):.1f} | {rates[0]:.1f} to {rates[-1]:.1f} "
            f"| {engine.bytes / 1e6:.0f} | {share:.0%} |"
        )


if __name__ == "__main__":
    main()
