"""bitsandbytes checkpoints: nf4 and fp4, with and without double quantisation, and LLM.int8(), made on the CPU.

    python -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2 safetensors==0.8.0
    venv/bin/python scripts/make_fixtures/make_bitsandbytes.py [NAME ...]

Each is loaded from the float model by transformers with a BitsAndBytesConfig and written by save_pretrained. Expected
values come from the saved folder, loaded again: weights by bitsandbytes' own dequantisation, logits by transformers on
those weights in float32 (LLM.int8() would round the activations too; `logits_quantised` are the logits with that).
The 4-bit weights are dequantised by its generic code, not by the CPU kernel of 0.50.2, which takes a wrong scale in
every row but the first where rows of 96 or 176 cross blocks of 64. What it wrote is right.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile

import bitsandbytes
import torch
import transformers
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_blockwise, int8_vectorwise_dequant
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from tiny_llama import FOREIGN, SHOWN, logits_of, save_expected, tiny_llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
DOUBLE = {"bnb_4bit_use_double_quant": True}
FIXTURES = {
    "bnb-nf4-double": ("odd", NF4 | DOUBLE),
    "bnb-nf4": ("small", NF4),
    "bnb-fp4": ("small", NF4 | {"bnb_4bit_quant_type": "fp4"}),
    "bnb-fp4-double": ("small", NF4 | DOUBLE | {"bnb_4bit_quant_type": "fp4"}),
    "bnb-int8": ("small", {"load_in_8bit": True, "llm_int8_threshold": 2.5}),
}


def quantise(name: str) -> None:
    shape, options = FIXTURES[name]
    folder = FOREIGN / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        tiny_llama(shape, torch.float16).save_pretrained(scratch)
        config = BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(
            scratch, quantization_config=config, dtype=torch.float16, device_map="cpu"
        )
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def dequantised(layer: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight[out, in], by bitsandbytes; LLM.int8()'s are float32 always."""
    if isinstance(layer, Linear4bit):
        state = layer.weight.quant_state
        absmax = state.absmax
        if state.nested:
            absmax = dequantize_blockwise(absmax, state.state2) + state.offset
        codes = layer.weight.data.reshape(-1)
        return _dequantize_4bit_compute(codes, absmax, state.code, state.blocksize, state.shape, dtype)
    absmax = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB  # moved by the first forward
    return int8_vectorwise_dequant(layer.weight.data, absmax)


def in_float(model: torch.nn.Module) -> torch.nn.Module:
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit | Linear8bitLt):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            linear.weight.data = dequantised(layer)
            model.set_submodule(name, linear)
    return torch.nn.Module.float(model)  # transformers refuses it by the name, for layers that are gone now


def expect(name: str) -> None:
    folder = FOREIGN / name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu").eval()
    layer = model.get_submodule(SHOWN)
    weight = dequantised(layer, torch.float16)  # what the checkpoint's quant_state says
    extra = {}
    code = "backends.default.ops._dequantize_4bit_compute"
    if isinstance(layer, Linear8bitLt):
        code, extra = "functional.int8_vectorwise_dequant", {"logits_quantised": logits_of(model)}
    made_by = {
        "bitsandbytes": bitsandbytes.__version__,
        "transformers": transformers.__version__,
        "weights": f"bitsandbytes.{code}",
        "logits": "those weights in float32",
    }
    save_expected(folder, logits_of(in_float(model)), {SHOWN: weight}, made_by, extra)


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints written by transformers with bitsandbytes.")
    parser.add_argument("names", nargs="*", default=list(FIXTURES), help="Folders to make; all unless said.")
    for name in parser.parse_args().names:
        quantise(name)
        expect(name)


if __name__ == "__main__":
    main()
