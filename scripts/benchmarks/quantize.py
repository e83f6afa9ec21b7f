"""Quantising a checkpoint from files to files: seconds of each method, and of its stages, with the peak of memory.

The checkpoint has random weights and a tokenizer of numbers, the text is random numbers: only shapes matter here, and
quality is another program's (scripts/fidelity_table.py). Each method is run once, after a small model of the same
family was quantised by it, so that libraries and kernels are loaded. Peak memory is torch's on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from accelpatch import api
from accelpatch.recipe import methods
from scripts.benchmarks.engines import random_model, shaped
from scripts.benchmarks.harness import TINY, Option, Table, cases, common
from scripts.benchmarks.preparation import timed

METHODS = ("rtn", "gptq", "awq", "gptq+awq")
OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16"),
    cases(METHODS, "The methods, one after the other."),
    Option("bits", 4, "Bits of the linear layers.", choices=(3, 4, 8)),
    Option("samples", 128, "Windows of the text."),
    Option("length", 2048, "Tokens of a window."),
    TINY,
    Option("folder", None, "Where checkpoints are written. It is a temporary folder if not given.", kind=Path),
)


def tokenizer_of(size: int) -> Any:
    """One whose tokens are the numbers below `size`."""
    words = Tokenizer(WordLevel({str(token): token for token in range(size)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")


def written(model: Any, folder: Path) -> int:
    """Write a checkpoint; returns how many tokens it knows."""
    size = int(model.config.vocab_size)
    model.save_pretrained(folder)
    tokenizer_of(size).save_pretrained(folder)
    return size


def text(file: Path, size: int, tokens: int) -> Path:
    """A file with so many random tokens of `size`."""
    drawn = torch.randint(1, size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    file.write_text(" ".join(map(str, drawn)))
    return file


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A row a method, printed as they come."""
    device = torch.device(asked.device)
    samples, length = (4, 64) if asked.tiny else (asked.samples, asked.length)
    printed = Table(f"{'a tiny Llama' if asked.tiny else asked.model}, {asked.bits} bits, {samples} x {length} tokens")
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        place = Path(made)
        size = written(random_model(asked), place / "float")
        small = argparse.Namespace(tiny=True, device=asked.device, dtype=asked.dtype)
        data = text(place / "text.txt", min(size, written(shaped("llama", small), place / "small")), samples * length)
        for method in asked.cases:
            recipe = methods.by_method(methods.of_bits(asked.bits), method, samples, length)
            given: Any = {"device": device, "data": None if method == "rtn" else data, "progress": False}
            name = method.replace("+", "-")
            api.quantize(str(place / "small"), recipe, place / f"{name}-small", **given)
            quantise = partial(api.quantize, str(place / "float"), recipe, place / name, **given)
            report, row = timed(quantise, device)
            stages = {f"{stage}, s": seconds for stage, seconds in report.seconds.items()}
            replaced = f"{report.replaced} of {len(report.sites)}"
            printed.add({"method": method, "replaced": replaced} | row | stages)
    return {"rows": printed.rows}
