"""AWQ checkpoints in GEMM and GEMV packing, quantised and packed by AutoAWQ's own code on the CPU.

    python -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 safetensors==0.8.0 datasets==5.1.0
    venv/bin/pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xzf autoawq-0.2.9.tar.gz
    venv/bin/python scripts/make_fixtures/make_autoawq.py --source autoawq-0.2.9

AutoAWQ's search needs older releases of transformers than this; what writes bytes does not. AwqQuantizer._apply_quant
rounds each weight (pseudo_quantize_tensor) and packs it (WQLinear_GEMM.from_linear, WQLinear_GEMV.from_linear);
AwqConfig makes the configuration. No scaling or clipping was searched: the formats store neither.
The expected weights are what pseudo_quantize_tensor left in the linear before it was packed, in float16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tiny_llama import FOREIGN, SHOWN, logits_of, save_expected, tiny_llama

FIXTURES = {"awq-gemm-4bit-g32-autoawq": "gemm", "awq-gemv-4bit-g32": "gemv"}
GROUP = 32


def awq_parts(source: Path) -> tuple[type, type]:
    """AwqQuantizer and AwqConfig, past the packages' __init__, which import every model family they knew."""
    for name in ("awq", "awq.models"):
        package = types.ModuleType(name)
        package.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = package
    from awq.models._config import AwqConfig
    from awq.quantize.quantizer import AwqQuantizer

    return AwqQuantizer, AwqConfig


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    layers = model.get_submodule("model.layers")
    return {
        f"model.layers.{name}": layer for name, layer in layers.named_modules() if isinstance(layer, torch.nn.Linear)
    }


def make(name: str, quantizer_class: type, config_class: type) -> None:
    version = FIXTURES[name]
    quantizer: Any = quantizer_class.__new__(quantizer_class)
    quantizer.__dict__.update(group_size=GROUP, zero_point=True, w_bit=4, version=version)
    model = tiny_llama(dtype=torch.float16)
    rounded = linears(model)
    quantizer._apply_quant(model, rounded)
    folder = FOREIGN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.config.quantization_config = config_class(q_group_size=GROUP, version=version).to_transformers_dict()
    model.config.save_pretrained(folder)
    state = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    weight = rounded[SHOWN].weight.data.clone()
    for key, layer in rounded.items():
        model.set_submodule(key, layer)
    made_by = {
        "autoawq": "0.2.9",
        "transformers": transformers.__version__,
        "weights": "AwqQuantizer.pseudo_quantize_tensor, before packing",
        "logits": "those weights in float32",
    }
    save_expected(folder, logits_of(model.float()), {SHOWN: weight}, made_by)
    print(json.dumps(json.loads((folder / "config.json").read_text())["quantization_config"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="AWQ checkpoints in the packing of AutoAWQ.")
    parser.add_argument("--source", type=Path, required=True, help="The unpacked source distribution of AutoAWQ.")
    source = parser.parse_args().source
    for name in FIXTURES:
        make(name, *awq_parts(source))


if __name__ == "__main__":
    main()
