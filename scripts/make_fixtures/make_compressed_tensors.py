"""compressed-tensors checkpoints (int-, pack- and float-quantized, MXFP4), made by llm-compressor on the CPU.

    python -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.17.0 accelerate==1.15.0 compressed-tensors==0.19.0 \
        safetensors==0.8.0 loguru pyyaml requests tqdm datasets==5.1.0 pillow nvidia-ml-py
    venv/bin/pip install --no-deps llmcompressor==0.14.0.1   # without auto-round, which nothing here uses
    venv/bin/python scripts/make_fixtures/make_compressed_tensors.py [NAME ...]

ct-pack-w4a16-g32-actorder is made by its name alone, in another environment: release 0.14 refuses actorder "group".
There: transformers==4.56.2 accelerate==1.10.1 compressed-tensors==0.12.2 datasets==4.1.1 numpy==2.3.5, and
llmcompressor==0.8.1 without its dependencies.

Each goes the tool's whole way: oneshot with a modifier, save_pretrained(save_compressed=True). Expected values come
from the saved folder as transformers loads it with compressed-tensors: `logits_quantised` with the activations rounded
as the format says, where it says so, and `logits` with the same weights and float activations.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from typing import Any

import compressed_tensors
import datasets
import llmcompressor
import torch
import transformers
from compressed_tensors.quantization import disable_quantization
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from tiny_llama import FOREIGN, SHOWN, calibration, logits_of, save_expected, tiny_llama, word_tokenizer
from transformers import AutoModelForCausalLM


def scheme(weights: dict[str, Any], activations: dict[str, Any] | None = None, targets: str = "Linear") -> dict:
    return {"targets": [targets], "weights": weights, "input_activations": activations}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT8_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_STATIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
MXFP4 = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
    "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
}  # fmt: skip
FP8_TOKEN = {**FP8, "strategy": "token", "dynamic": True}
FP8_STATIC = {**FP8, "strategy": "tensor", "dynamic": False}
FIXTURES: dict[str, tuple[type, dict[str, dict[str, Any]]]] = {
    "ct-pack-w4a16-g32": (QuantizationModifier, {"group_0": scheme(INT4)}),
    "ct-pack-w4a16-g32-asym": (
        GPTQModifier,
        {"group_0": scheme({**INT4, "symmetric": False, "actorder": "weight"})},
    ),
    "ct-mxfp4": (QuantizationModifier, {"group_0": scheme(MXFP4)}),
    "ct-int-w8a8": (QuantizationModifier, {"group_0": scheme(INT8, INT8_TOKEN)}),
    "ct-int-w8a8-static": (QuantizationModifier, {"group_0": scheme(INT8, INT8_STATIC)}),
    "ct-float-fp8": (
        QuantizationModifier,
        {
            "group_0": scheme({**FP8, "strategy": "channel"}, FP8_TOKEN, "re:.*self_attn.*"),
            "group_1": scheme({**FP8, "strategy": "tensor"}, FP8_STATIC, "re:.*mlp.*"),
        },
    ),
}

OLDER: dict[str, tuple[type, dict[str, dict[str, Any]]]] = {
    "ct-pack-w4a16-g32-actorder": (GPTQModifier, {"group_0": scheme({**INT4, "actorder": "group"})}),
}


def quantise(name: str) -> None:
    modifier, groups = (FIXTURES | OLDER)[name]
    folder = FOREIGN / name
    shutil.rmtree(folder, ignore_errors=True)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in calibration()]
    with tempfile.TemporaryDirectory() as scratch:
        tiny_llama(dtype=torch.bfloat16).save_pretrained(scratch)
        word_tokenizer().save_pretrained(scratch)
        model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.bfloat16)
        oneshot(
            model=model,
            tokenizer=word_tokenizer(),
            dataset=datasets.Dataset.from_list(rows),
            recipe=modifier(config_groups=groups, ignore=["lm_head"]),
            max_seq_length=len(rows[0]["input_ids"]),
            num_calibration_samples=len(rows),
            log_dir=None,
        )
        model.save_pretrained(folder, save_compressed=True)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def expect(name: str) -> None:
    folder = FOREIGN / name
    dtype = torch.bfloat16 if name == "ct-mxfp4" else torch.float32  # it is decompressed to bfloat16 in any case
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model(input_ids=calibration(1))  # decompresses, where loading did not
    torch.nn.Module.float(model)
    weight = model.get_submodule(SHOWN).weight.data
    extra = {}
    if any(group["input_activations"] for group in (FIXTURES | OLDER)[name][1].values()):
        extra = {"logits_quantised": logits_of(model)}
    model.apply(disable_quantization)
    made_by = {
        "llmcompressor": llmcompressor.__version__,
        "compressed-tensors": compressed_tensors.__version__,
        "transformers": transformers.__version__,
        "weights": "as transformers decompresses them",
        "logits": "those weights in float32",
    }
    save_expected(folder, logits_of(model), {SHOWN: weight}, made_by, extra)


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints written by llm-compressor.")
    parser.add_argument(
        "names", nargs="*", default=list(FIXTURES), help="Folders to make; all that this release can unless said."
    )
    for name in parser.parse_args().names:
        quantise(name)
        expect(name)


if __name__ == "__main__":
    main()
