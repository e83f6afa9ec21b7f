"""GPTQ checkpoints, v1 and v2, and AWQ ones: quantised, packed and saved by GPTQModel on the CPU.

    python -m venv venv && venv/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors==0.8.0
    venv/bin/pip install --no-deps gptqmodel==7.7.0   # it asks for a newer torch than it needs here
    venv/bin/pip install accelerate==1.15.0 threadpoolctl device-smi protobuf pillow pypcre tokenicer==0.0.14 logbar \
        ninja maturin datasets pyarrow dill torchao==0.18.0 defuser==0.0.28
    GPTQMODEL_CPU_WORKERS=2 venv/bin/python scripts/make_fixtures/make_gptq.py [NAME ...]

Each checkpoint goes the tool's whole way: GPTQModel.load, quantize with calibration, save. The logits are those of the
saved folder as GPTQModel loads it again with its plain torch kernels, every float then in float32. GPTQModel leaves
logs in the current folder.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig, __version__
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from tiny_llama import FOREIGN, SHOWN, calibration, logits_of, save_expected, tiny_llama, word_tokenizer

GPTQ = {"quant_method": "gptq", "format": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "format": "gemm", "bits": 4, "group_size": 32, "sym": False}
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq-4bit-g32": ("small", GPTQ),
    "gptq-4bit-g32-asym-actorder": ("small", GPTQ | {"sym": False, "desc_act": True}),
    "gptq-4bit-g128-bias": ("wide", GPTQ | {"group_size": 128}),
    "gptq-8bit-channel": ("small", GPTQ | {"bits": 8, "group_size": -1, "act_group_aware": False}),
    "gptq-v2-4bit-g32-asym": ("small", GPTQ | {"format": "gptq_v2", "sym": False}),
    "awq-gemm-4bit-g32": ("even", AWQ),
}
KEPT = ("config.json", "quantize_config.json", "model.safetensors")


def quantise(shape: str, options: dict[str, Any], folder: Path) -> None:
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in calibration()]
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        tiny_llama(shape, torch.float16).save_pretrained(before)
        word_tokenizer().save_pretrained(before)
        config = QuantizeConfig(device="cpu", offload_to_disk=False, **options)
        model = GPTQModel.load(before, config, dtype=torch.float16)
        model.quantize(rows, batch_size=1)
        model.save(after)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in KEPT:
            shutil.copy(Path(after) / name, folder / name)


def awq_weight(layer: AwqTorchLinear, scales: torch.Tensor) -> torch.Tensor:
    """weight[out, in]: the layer's own forward calls this function."""
    return dequantize_gemm(layer.qweight, layer.qzeros, scales, layer.bits, layer.group_size).T


def awq_in_float(model: torch.nn.Module) -> torch.nn.Module:
    """AwqTorchLinear computes in half precision only: its weights, dequantised by its code, in plain linears."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, AwqTorchLinear):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            linear.weight.data = awq_weight(layer, layer.scales.float())
            model.set_submodule(name, linear)
    return model.float()


def expect(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        word_tokenizer().save_pretrained(scratch)
        backend = BACKEND.AWQ_TORCH if folder.name.startswith("awq") else BACKEND.GPTQ_TORCH
        model = GPTQModel.load(scratch, backend=backend, device="cpu", dtype=torch.float16).model
    layer = model.get_submodule(SHOWN)
    made_by = {"gptqmodel": __version__, "transformers": transformers.__version__}
    if isinstance(layer, AwqTorchLinear):
        weight, model = awq_weight(layer, layer.scales), awq_in_float(model)
        made_by |= {"weights": dequantize_gemm.__qualname__, "logits": "dequantize_gemm's weights in float32"}
    else:
        weight, model = layer.dequantize_weight().T, model.float()
        made_by |= {"weights": "TorchLinear.dequantize_weight", "logits": "TorchLinear in float32"}
    save_expected(folder, logits_of(model), {SHOWN: weight}, made_by)


def main() -> None:
    parser = argparse.ArgumentParser(description="GPTQ and AWQ checkpoints written by GPTQModel.")
    parser.add_argument("names", nargs="*", default=list(FIXTURES), help="Folders to make; all unless said.")
    for name in parser.parse_args().names:
        shape, options = FIXTURES[name]
        quantise(shape, options, FOREIGN / name)
        expect(FOREIGN / name)


if __name__ == "__main__":
    main()
