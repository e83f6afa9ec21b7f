"""Print what llm-compressor's 4-bit GPTQ loses on the model and the text of docs/quantization.md.

python scripts/quantization_peers.py [--group 64] [--samples 64]

It needs an environment of its own that has llmcompressor, with accelpatch's source on PYTHONPATH. The tool gets the
same model with noise added, in float32, and the same windows of token ids, and rounds the linear layers but the head to
4 bits in groups with a zero point. The head is then rounded to int8 as `int4` has it, so that the row compares with
those of `scripts/fidelity_table.py --methods`. The weights that it gives are run as floats by plain torch modules.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelpatch.models import load
from accelpatch.quant import int8
from accelpatch.quant.formats import dequantize
from tests.support.fidelity import english_tokens, first_dividing, logits_of, mean_kl_top1, noised, perplexity

HEAD = (128, 64, 32, None)  # group sizes of the head in `int4`, of which the first that divides K counts
LINEAR = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}


def round_by_llmcompressor(model: Any, tokenizer: Any, windows: Tensor, group: int) -> None:
    """Round a model's weights in place: inputs by the size of their activations, groups in their places."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    scheme = {"group_0": {"targets": ["Linear"], "weights": LINEAR | {"group_size": group}}}
    modifier = GPTQModifier(config_groups=scheme, ignore=["lm_head"], actorder="static")
    rows = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
    oneshot(
        model=model, tokenizer=tokenizer, dataset=rows, recipe=modifier, num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1], shuffle_calibration_samples=False,
    )  # fmt: skip


def with_int8_head(model: Any) -> Any:
    """The model with the values of an int8 head, which the table of embeddings has too where they are tied."""
    weight = model.get_output_embeddings().weight
    rounded = int8.quantize(weight.data, group_size=first_dividing(HEAD, weight.shape[1]))
    weight.data = dequantize(rounded, weight.dtype)
    return model


def main() -> None:
    """Load, let the tool round, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="A model's name or folder (default: %(default)s).")
    parser.add_argument("--tokens", type=int, default=2560, help="Tokens of English to read (default: %(default)s).")
    parser.add_argument("--group", type=int, default=64, help="Their group size (default: %(default)s).")
    parser.add_argument("--samples", type=int, default=64, help="Windows they calibrate on (default: %(default)s).")
    asked = parser.parse_args()
    loaded = load.load(asked.model, dtype=torch.float32)
    model = noised(loaded.model, 0)
    prose = english_tokens(loaded.tokenizer, asked.tokens + 256 * asked.samples)
    ids, windows = prose[: asked.tokens // 256], prose[asked.tokens // 256 :]
    reference = logits_of(model, ids)
    start = time.process_time()
    round_by_llmcompressor(model, loaded.tokenizer, windows, asked.group)
    seconds = time.process_time() - start
    logits = logits_of(with_int8_head(model), ids)
    found = mean_kl_top1(reference, logits)
    print("| tool | mean KL, nats | top-1 agreement | perplexity | time |\n| --- | --- | --- | --- | --- |")
    figures = f"{found.kl:.4f} | {found.top1:.1%} | {perplexity(logits, ids):.2f} | {seconds:.0f} s"
    print(f"| llmcompressor {version('llmcompressor')} | {figures} |")


if __name__ == "__main__":
    main()
