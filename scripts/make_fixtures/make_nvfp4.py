"""NVFP4 checkpoints as compressed-tensors and as NVIDIA's ModelOpt write them, made by the two libraries' own code.

    python -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.17.0 safetensors==0.8.0 loguru
    venv/bin/pip install --no-deps compressed-tensors==0.20.1 nvidia-modelopt==0.47.0 omegaconf antlr4-python3-runtime
    venv/bin/python scripts/make_fixtures/make_nvfp4.py

Each linear layer is quantised and packed by the library's class for the format, and each has a global scale of its own.
Expected weights are what that class unpacks; logits are those of these weights in float32, with float activations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from tiny_llama import FOREIGN, SHOWN, logits_of, save_expected, tiny_llama
from torch import Tensor, nn

GROUP, INPUT = 16, 3.5  # INPUT: the largest magnitude that the inputs are said to have
WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP}
ACTIVATIONS = {**WEIGHTS, "dynamic": "local"}
Tensors = dict[str, Tensor]


def of_compressed_tensors(weight: Tensor) -> tuple[Tensors, Tensor]:
    """The tensors of a layer, and its weight unpacked."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WEIGHTS))
    groups = weight.unflatten(1, (-1, GROUP))
    whole = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights, global_scale=whole)
    held = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    packed = NVFP4PackedCompressor.compress(held, scheme)
    # as its `decompress`, but in float32: that rounds scale / global scale to bfloat16
    values = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
    unpacked = dequantize(values, packed["weight_scale"].float(), args=scheme.weights, global_scale=whole)
    limit = torch.tensor(INPUT)
    return {**packed, "input_global_scale": generate_gparam(-limit, limit)}, unpacked


def of_modelopt(weight: Tensor) -> tuple[Tensors, Tensor]:
    """The same of ModelOpt."""
    made, scale, whole = NVFP4QTensor.quantize(weight.clone(), GROUP)
    unpacked = made.dequantize(dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: GROUP})
    held = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    return {**held, "input_scale": torch.tensor(INPUT / (6 * 448))}, unpacked


CONFIGS: dict[str, dict[str, Any]] = {
    "ct-nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
        "global_compression_ratio": None, "kv_cache_scheme": None, "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS,
                "output_activations": None, "format": "nvfp4-pack-quantized",
            }
        },
    },
    "modelopt-nvfp4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP},
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP},
                "targets": ["Linear"],
            }
        },
    },
}  # fmt: skip
WRITERS: dict[str, Callable[[Tensor], tuple[Tensors, Tensor]]] = {
    "ct-nvfp4": of_compressed_tensors, "modelopt-nvfp4": of_modelopt,
}  # fmt: skip


@torch.no_grad()
def write(name: str) -> None:
    model = tiny_llama()
    tensors = {key: one.bfloat16().clone() for key, one in model.state_dict().items() if key != "lm_head.weight"}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            held, unpacked = WRITERS[name](module.weight.data)
            del tensors[f"{path}.weight"]
            tensors |= {f"{path}.{key}": one.detach().contiguous() for key, one in held.items()}
            module.weight.data = unpacked.float()
    folder = FOREIGN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string(use_diff=True))
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": CONFIGS[name]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    made_by = {package: version(package) for package in ("compressed-tensors", "nvidia-modelopt")}
    made_by |= {"weights": "as the library's class unpacks them", "logits": "those weights in float32"}
    save_expected(folder, logits_of(model), {SHOWN: model.get_submodule(SHOWN).weight.data}, made_by)


if __name__ == "__main__":
    for each in WRITERS:
        write(each)
