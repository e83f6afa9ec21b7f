"""Checkpoints that others' tools wrote (fixtures/foreign): what their linear layers become, and what is due of each."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[1] / "fixtures/foreign"
K_PROJ = "model.layers.0.self_attn.k_proj"
#: folder -> (replacer of its linear layers, how far its logits may be from those of the writer's own code)
READ = {
    "gptq-4bit-g32": ("int4_weight_only", 1e-5), "gptq-4bit-g32-asym-actorder": ("int4_weight_only", 1e-5),
    "gptq-4bit-g128-bias": ("int4_weight_only", 1e-5),
    "gptq-8bit-channel": ("int8_weight_only", 1e-5), "gptq-v2-4bit-g32-asym": ("int4_weight_only", 1e-5),
    "awq-gemm-4bit-g32": ("int4_weight_only", 1e-5),
    "awq-gemm-4bit-g32-autoawq": ("int4_weight_only", 1e-3),  # its own code rounds the weights to float16
    "awq-gemv-4bit-g32": ("int4_weight_only", 1e-3),
    "ct-pack-w4a16-g32-actorder": ("int4_weight_only", 1e-5),
    "ct-pack-w4a16-g32": ("int4_weight_only", 1e-5), "ct-pack-w4a16-g32-asym": ("int4_weight_only", 1e-5),
    "bnb-nf4": ("nf4_weight_only", 1e-5), "bnb-nf4-double": ("nf4_weight_only", 1e-5),
    "bnb-fp4": ("fp4_weight_only", 1e-5), "bnb-fp4-double": ("fp4_weight_only", 1e-5),
    "bnb-int8": ("int8_weight_only", 1e-5),
    "ct-mxfp4": ("mxfp4_weight_only", 1e-5),
    "ct-nvfp4": ("nvfp4_weight_only", 1e-5), "modelopt-nvfp4": ("nvfp4_weight_only", 1e-5),
    "ct-int-w8a8": ("w8a8", 0.05), "ct-float-fp8": ("w8a8_fp8", 0.05),  # activations are rounded
}  # fmt: skip


def expected(name: str) -> dict[str, Tensor]:
    return load_file(ROOT / name / "expected.safetensors")
