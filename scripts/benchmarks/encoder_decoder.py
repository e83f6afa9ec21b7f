"""Time generate() of encoder-decoders, speech and text, patched and not.

    python scripts/bench.py encoder_decoder [--cases whisper whisper-16 t5 t5-beams] [--recipes exact int8 int4]
        [--device cuda] [--dtype bfloat16] [--repeats 5]

Each model has the named shape and random weights, and no token ends a text: Whisper-large-v3 (30 s of sound, 64 tokens,
batch 1 and 16) and Flan-T5-XL (128 tokens, then 64 new ones; greedy, and beams of 4); for CPUs Whisper-base, T5-small
and a Marian model. They are patched as users patch them, verified; the calls are stock ones. Figures are medians over
`--repeats` turns in which every engine runs once, in an order that changes from turn to turn: seconds of the whole
call, how often the unpatched model's call takes them, and what a token beyond the first takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from accelpatch.bench.timing import once
from scripts.benchmarks.engines import STOCK, freed, in_turn, patched
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

ENDLESS: dict[str, Any] = {"eos_token_id": None, "forced_eos_token_id": None, "suppress_tokens": None,
                           "begin_suppress_tokens": None}  # fmt: skip


def whisper(size: int, layers: int, heads: int, mels: int, vocabulary: int) -> dict[str, Any]:
    """A Whisper of so many layers in the encoder and in the decoder."""
    each = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * size}
    parts = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in each.items()}
    return {"d_model": size, "num_mel_bins": mels, "vocab_size": vocabulary, "pad_token_id": 0, **parts}


_BASE = {"vocab_size": 32128, "pad_token_id": 0, "decoder_start_token_id": 0}
_MARIAN = {"vocab_size": 58101, "d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_layers": 6,
           "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "pad_token_id": 58100,
           "decoder_start_token_id": 58100, "activation_function": "swish", "max_position_embeddings": 512,
           "scale_embedding": True}  # fmt: skip
#: name -> (prefix of the configuration's class, of the model's, configuration)
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Whisper-large-v3": ("Whisper", "WhisperForConditionalGeneration", whisper(1280, 32, 20, 128, 51866)),
    "Whisper-base": ("Whisper", "WhisperForConditionalGeneration", whisper(512, 6, 8, 80, 51865)),
    "Flan-T5-XL": (
        "T5",
        "T5ForConditionalGeneration",
        _BASE
        | {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32, "tie_word_embeddings": False}
        | {"feed_forward_proj": "gated-gelu"},
    ),
    "T5-small": (
        "T5",
        "T5ForConditionalGeneration",
        _BASE | {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    ),
    "Marian": ("Marian", "MarianMTModel", _MARIAN),
}
SMALL: dict[str, dict[str, Any]] = {
    "Whisper": whisper(64, 2, 4, 16, 512) | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    "T5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 512},
    "Marian": {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2,
               "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 512, "pad_token_id": 0,
               "decoder_start_token_id": 0},
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """generate() of a model of a shape: rows at once, greedy where not said otherwise."""

    shape: str
    rows: int = 1
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "whisper": Call("Whisper-large-v3"), "whisper-16": Call("Whisper-large-v3", 16),
    "t5": Call("Flan-T5-XL"), "t5-beams": Call("Flan-T5-XL", options={"num_beams": 4}),
    "whisper-base": Call("Whisper-base"), "t5-small": Call("T5-small"), "marian": Call("Marian"),
    "t5-small-beams": Call("T5-small", options={"num_beams": 4}),
}  # fmt: skip
OPTIONS = (
    cases(["whisper", "whisper-16", "t5", "t5-beams"], "The calls to time.", CASES),
    Option("tokens", 64, "New tokens of a call."), Option("prompt", 128, "Tokens of the encoder's text."),
    *common(device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5), TINY,
)  # fmt: skip


def made(shape: str, asked: argparse.Namespace) -> Any:
    """The model, with random weights, made on the device."""
    prefix, name, config = SHAPES[shape]
    if asked.tiny:
        config = config | SMALL[prefix]
    torch.manual_seed(0)
    with torch.device(asked.device):
        kind: Any = getattr(transformers, name)
        model: Any = kind._from_config(getattr(transformers, f"{prefix}Config")(**config), dtype=dtype_of(asked))
    model.generation_config.update(**ENDLESS)
    model.config.forced_eos_token_id = None
    return model.eval()


def dtype_of(asked: argparse.Namespace) -> torch.dtype:
    """Of the weights."""
    dtype: torch.dtype = getattr(torch, asked.dtype)
    return dtype


def inputs(model: Any, call: Call, asked: argparse.Namespace) -> dict[str, Tensor]:
    """What the encoder gets: 30 s of sound, or texts."""
    draw = torch.Generator().manual_seed(0)
    if hasattr(model.config, "num_mel_bins"):
        sound = torch.randn(call.rows, model.config.num_mel_bins, 3000, generator=draw)
        return {"input_features": sound.to(asked.device, model.dtype)}
    ids = torch.randint(5, 500, (call.rows, asked.prompt), generator=draw).to(asked.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answer(model: Any, given: dict[str, Tensor], options: dict[str, Any], new: int) -> Tensor:
    """Exactly so many new tokens."""
    made: Tensor = model.generate(**given, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})
    return made


def timed(call: Call, engines: dict[str, Any], asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of a call of one token and of all, by engine, in turn."""
    given = inputs(engines[STOCK], call, asked)
    runs: dict[tuple[str, int], Callable[[], float]] = {}
    for name, model in engines.items():
        for new in (1, asked.tokens):
            one = partial(answer, model, given, call.options, new)
            runs[name, new] = partial(once, one, torch.device(asked.device))
            one()
            one()
    found = in_turn(runs, asked.repeats, 1, alternating=True)
    return {name: {"first": found[name, 1], "all": found[name, asked.tokens]} for name in engines}


def compared(name: str, engines: dict[str, Any], asked: argparse.Namespace, printed: Table) -> None:
    """The rows of a case, and how the patched models ran it."""
    call = CASES[name]
    before = {key: dict(paths_of(model)) for key, model in engines.items() if key != STOCK}
    found = timed(call, engines, asked)
    middle = {key: statistics.median(one["all"]) for key, one in found.items()}
    for key, one in found.items():
        first = statistics.median(one["first"])
        row = {"case": name, "engine": key, "whole call, ms": 1e3 * middle[key]}
        row |= {"fastest to slowest, ms": (1e3 * min(one["all"]), 1e3 * max(one["all"]))}
        row |= {f"times {STOCK}": middle[STOCK] / middle[key], "first token, ms": 1e3 * first}
        row["ms a step"] = 1e3 * (middle[key] - first) / (asked.tokens - 1)
        printed.add(row)
        printed.rows[-1]["seconds"] = one
    for key, old in before.items():
        ran = {way: count - old.get(way, 0) for way, count in paths_of(engines[key]).items()}
        print(f"  {name}, {key}: { {way: count for way, count in ran.items() if count} }", flush=True)


def paths_of(model: Any) -> dict[str, int]:
    """How the calls of a patched model ran."""
    return dict(model.accelpatch.report().paths)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; the models of one shape are in memory together."""
    printed = Table(f"{asked.tokens} new tokens, medians of {asked.repeats} after 3 to warm up")
    for shape in dict.fromkeys(CASES[name].shape for name in asked.cases):
        base = made(shape, asked)
        engines = {STOCK: base} | {recipe: patched(base, recipe).model for recipe in asked.recipes}
        for name in asked.cases:
            if CASES[name].shape == shape:
                compared(name, engines, asked, printed)
        del base, engines
        freed()
    return {"rows": printed.rows}
