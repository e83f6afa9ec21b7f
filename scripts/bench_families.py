"""Decode rates of every fused family on one GPU, beside Llama's at the same bytes.

    python scripts/bench_families.py [--families olmo2 granite ...] [--recipe exact] [--layers 8] [--repeats 3]
        [--json FILE]

Each model has the widths of Llama-2-7B and random bf16 weights, made on the device; it is patched with the defaults,
verified, and decodes by stock generate(). A rate is taken from the difference of a long and a short answer. The last
column is bytes times rate, over Llama's: 1 is as near to the read limit as Llama is. `one layer by modules` is Llama
with one layer that is not fused, as if it had been over its bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.models.family import FAMILIES
from accelpatch.runtime.generation.patched_model import RUNTIME

WIDTHS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_OF_GPT2 = {"n_embd": 4096, "n_head": 32, "n_inner": 16512, "n_positions": 4096}
# MLPs without a gate: 3/2 of the inner width are the bytes of three matrices
_PLAIN = {"intermediate_size": 16512}
MORE: dict[str, dict[str, Any]] = {
    "glm": {"partial_rotary_factor": 0.5}, "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": _PLAIN, "phi": _PLAIN, "starcoder2": _PLAIN | {"sliding_window": None}, "gpt2": _OF_GPT2,
    "opt": {"ffn_dim": 16512, "word_embed_proj_dim": 4096},
}  # fmt: skip
WITHOUT_DENSE_LAYERS = ("mixtral", "qwen3_moe")
SHORT, LONG, PROMPT = 32, 160, 64


def made(name: str, layers: int) -> Any:
    """A model of a family with random weights, on the GPU."""
    family = next(one for one in FAMILIES if one.name == name)
    prefix = family.classes + ("Text" if name == "gemma3" else "")
    config = getattr(transformers, f"{prefix}Config")(**{**WIDTHS, "num_hidden_layers": layers, **MORE.get(name, {})})
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
            model = getattr(transformers, f"{family.classes}{suffix}")(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.to(torch.bfloat16).eval()


def rate(model: Any, repeats: int) -> tuple[float, float]:
    """(tokens per second, spread) of decoding one sequence."""
    ids = torch.randint(2, 31000, (1, PROMPT), device="cuda")

    def seconds(new: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for new in (SHORT, LONG, SHORT):
        seconds(new)
    rates = sorted((LONG - SHORT) / (seconds(LONG) - seconds(SHORT)) for _ in range(repeats))
    return statistics.median(rates), rates[-1] - rates[0]


def main() -> None:
    """Measure and print."""
    known = [family.name for family in FAMILIES if family.layer and family.name not in WITHOUT_DENSE_LAYERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=known, choices=known, help="Families (default: all fused).")
    parser.add_argument("--recipe", default="exact", help="The recipe (default: exact).")
    parser.add_argument("--layers", type=int, default=8, help="Layers of each model (default: 8).")
    parser.add_argument("--repeats", type=int, default=3, help="Timed turns (default: 3).")
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {asked.layers} layers, {asked.recipe}, batch 1")
    print(
        "| family | fused | bytes a token, GB | tokens/s | spread | bytes x rate over Llama's |\n" + "| --- " * 6 + "|"
    )
    found: dict[str, Any] = {}
    for name in dict.fromkeys(["llama", *asked.families, "one layer by modules"]):
        model = made("llama" if " " in name else name, asked.layers)
        accelpatch.patch(model, asked.recipe, keep_original="none")
        if " " in name:
            vars(model)[RUNTIME].unfuse({asked.layers // 2: "planted"})
        report = model.accelpatch.report()
        tokens, spread = rate(model, asked.repeats)
        read = report.token_bytes[1]
        fused = len(vars(model)[RUNTIME].captured.fused.places)
        found[name] = {"rate": tokens, "spread": spread, "bytes": read, "fused": fused}
        share = tokens * read / (found["llama"]["rate"] * found["llama"]["bytes"])
        print(
            f"| {name} | {fused} of {asked.layers} | {read / 1e9:.2f} | {tokens:.1f} | {spread:.1f} | {share:.3f} |",
            flush=True,
        )
        for site in report.sites:
            if site.by_modules:
                print(f"  {site.path}: {site.by_modules}")
                break
        del model
        torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
