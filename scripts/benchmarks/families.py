"""Decode rates of every fused family on one GPU, beside Llama's at the same bytes.

    python scripts/bench.py families [--cases olmo2 granite ...] [--recipe exact] [--layers 8] [--repeats 3]

Each model has the widths of Llama-2-7B and random bf16 weights, made on the device; it is patched with the defaults,
verified, and decodes by stock generate(). A rate is taken from the difference of an answer of 160 tokens and one of 32.
The last column is bytes times rate, over Llama's: 1 is as near to the read limit as Llama is. `one layer by modules` is
Llama with one layer that is not fused, as if it had been over its bound.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

from accelpatch.models.family import FAMILIES
from accelpatch.runtime.generation.patched_model import RUNTIME
from scripts.benchmarks.engines import answers, figures, freed, patched, plain
from scripts.benchmarks.harness import Case, Option, Table, cases, common

WIDTHS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
# MLPs without a gate: 3/2 of the inner width are the bytes of three matrices
_PLAIN = {"intermediate_size": 16512}
MORE: dict[str, dict[str, Any]] = {
    "glm": {"partial_rotary_factor": 0.5}, "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": _PLAIN, "phi": _PLAIN, "starcoder2": _PLAIN | {"sliding_window": None},
    "gpt2": {"n_embd": 4096, "n_head": 32, "n_inner": 16512, "n_positions": 4096},
    "opt": {"ffn_dim": 16512, "word_embed_proj_dim": 4096},
}  # fmt: skip
WITHOUT_DENSE_LAYERS = ("mixtral", "qwen3_moe")
CASES = [family.name for family in FAMILIES if family.layer and family.name not in WITHOUT_DENSE_LAYERS]
FIRST, UNFUSED = "llama", "one layer by modules"
OPTIONS = (
    cases(CASES, "Families beside Llama."), Option("recipe", "exact", "The recipe to patch with."),
    Option("layers", 8, "Layers of each model."), *common(device="cuda", repeats=3),
)  # fmt: skip
CASE, SHORT = Case(1, 64, 160), 32


def made(name: str, layers: int, device: str) -> Any:
    """A model of a family with random weights, made on the device."""
    family = next(one for one in FAMILIES if one.name == name)
    prefix = family.classes + ("Text" if name == "gemma3" else "")
    config = getattr(transformers, f"{prefix}Config")(**{**WIDTHS, "num_hidden_layers": layers, **MORE.get(name, {})})
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
            model = getattr(transformers, f"{family.classes}{suffix}")(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.to(torch.bfloat16).eval()


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    printed = Table(f"{asked.layers} layers, {asked.recipe}, batch 1, prompt {CASE.prompt}")
    ids = torch.randint(2, 31000, (1, CASE.prompt), device=asked.device)
    for name in dict.fromkeys([FIRST, *asked.cases, UNFUSED]):
        model = made(FIRST if name == UNFUSED else name, asked.layers, asked.device)
        engine = patched(model, asked.recipe, name, keep=False, how=plain)
        if name == UNFUSED:
            vars(model)[RUNTIME].unfuse({asked.layers // 2: "planted"})
        for new in (SHORT, CASE.new, SHORT):
            engine.call(ids, new)
        (row,) = figures(CASE, answers({name: engine}, ids, CASE.new, asked.repeats, 0, SHORT), short=SHORT)
        fused = len(vars(model)[RUNTIME].captured.fused.places)
        row |= {"fused": f"{fused} of {asked.layers}", "GB a token": engine.bytes / 1e9}
        first = (printed.rows or [row])[0]
        row["bytes, times"] = row["tok/s"] * row["GB a token"] / (first["tok/s"] * first["GB a token"])
        printed.add(row)
        reasons = [site for site in model.accelpatch.report().sites if site.by_modules]
        print("".join(f"  {site.path}: {site.by_modules}\n" for site in reasons[:1]), end="")
        del model, engine
        freed()
    return {"families": printed.rows}
