"""The layouts of quantised checkpoints that others write and accelpatch reads as they are: a record of each.

    gptq, awq            linear layers of 4 bits (gptq: 8 too), as GPTQModel and AutoAWQ write them
    bitsandbytes         linear layers in nf4, fp4 or LLM.int8()
    compressed-tensors   the same, pack-quantized; int-quantized and float-quantized, whose activations have 8 bits too;
                         MXFP4, NVFP4
    fp8                  linear layers and experts in FP8 blocks of 128 x 128, of DeepSeek-V3, Qwen3 and transformers
    modelopt             linear layers and experts in NVFP4, as NVIDIA's ModelOpt writes them
    mxfp4                experts in MXFP4, as transformers has gpt-oss

Each quantised layer has the tensors that its record names; all else is float under the family's names. To read another:
a record here and its reader in quant/. What of a layout is not read: unread.py. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Scheme:
    """What compressed-tensors may say of the layers of one of its formats: `strategy`, `num_bits`, `type` and
    `group_size` (None: any) of their weights, and whether their activations are quantised. floats: activations stay
    floats here, whatever it says of them."""

    strategies: tuple[str, ...]
    bits: tuple[int, ...] = (8,)
    type: str = "int"
    activations: bool = False
    group_size: int | None = None
    floats: bool = False


@dataclass(frozen=True)
class ForeignLayout:
    """How others hold a quantised layer.

    method: quant_method in config.json. library: what reads all of it. reader: module and function in quant/ that make
    the canonical weight. parts: a layer's tensors. marks: a tensor that shows that a layer is quantised -> the name of
    its replacer, with arguments of the layout in braces. experts: whether a layer is all experts of an MLP, of which
    the reader makes the tensors of our state dict. of_each: the replacer of experts whose layers a checkpoint has one
    by one, under their numbers (experts.7.gate_proj); "" where such ones are not read.
    """

    method: str
    library: str
    reader: str
    parts: tuple[str, ...]
    marks: Mapping[str, str]
    scheme: Scheme | None = None
    experts: bool = False
    of_each: str = ""


MODEL = "GPTQModel"
OR_VLLM = "GPTQModel, or vLLM,"
TENSORS = "transformers with the package compressed-tensors, or vLLM,"
BITSANDBYTES = "transformers with the package bitsandbytes"
INTEGERS = "int{bits}_weight_only"
STATE = "weight.quant_state.bitsandbytes__"
ROWS = ("weight_scale", "weight", "input_scale", "input_zero_point")

LAYOUTS: Mapping[str, ForeignLayout] = MappingProxyType({
    "gptq": ForeignLayout(
        "gptq", OR_VLLM, "packed_formats.gptq", ("qweight", "qzeros", "scales", "g_idx"), {"qweight": INTEGERS}),
    "awq": ForeignLayout("awq", OR_VLLM, "packed_formats.awq", ("qweight", "qzeros", "scales"), {"qweight": INTEGERS}),
    "bitsandbytes-4bit": ForeignLayout(
        "bitsandbytes", BITSANDBYTES, "bitsandbytes_formats.four_bits",
        (f"{STATE}nf4", f"{STATE}fp4", "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
         "weight.nested_quant_map"),
        {f"{STATE}nf4": "nf4_weight_only", f"{STATE}fp4": "fp4_weight_only"}),
    "bitsandbytes-8bit": ForeignLayout(
        "bitsandbytes", BITSANDBYTES, "bitsandbytes_formats.int8", ("SCB", "weight", "weight_format"),
        {"SCB": "int8_weight_only"}),
    "int-quantized": ForeignLayout(
        "compressed-tensors", TENSORS, "packed_formats.rows", ROWS, {"weight_scale": "w8a8"},
        Scheme(("channel", "tensor"), activations=True)),
    "float-quantized": ForeignLayout(
        "compressed-tensors", TENSORS, "packed_formats.rows", ROWS, {"weight_scale": "{replacer}"},
        Scheme(("channel", "tensor"), type="float", activations=True)),
    "pack-quantized": ForeignLayout(
        "compressed-tensors", TENSORS, "packed_formats.packed",
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        {"weight_packed": INTEGERS}, Scheme(("group", "channel"), (4, 8))),
    "mxfp4-pack-quantized": ForeignLayout(
        "compressed-tensors", TENSORS, "mxfp4.packed", ("weight_packed", "weight_scale"),
        {"weight_packed": "mxfp4_weight_only"}, Scheme(("group",), (4,), "float", group_size=32)),
    "nvfp4-pack-quantized": ForeignLayout(
        "compressed-tensors", TENSORS, "nvfp4.compressed",
        ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
        {"weight_packed": "nvfp4_weight_only"}, Scheme(("tensor_group",), (4,), "float", group_size=16, floats=True),
        of_each="nvfp4_experts"),
    "modelopt": ForeignLayout(
        "modelopt", "TensorRT-LLM, or vLLM,", "nvfp4.modelopt",
        ("weight", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"),
        {"weight_scale_2": "nvfp4_weight_only"}, of_each="nvfp4_experts"),
    "fp8": ForeignLayout(
        "fp8", "transformers itself, on a GPU,", "fp8_blocks.blocks", ("weight", "weight_scale_inv"),
        {"weight_scale_inv": "fp8_blocks"}, of_each="fp8_block_experts"),
    "mxfp4": ForeignLayout(
        "mxfp4", "transformers with the package kernels", "mxfp4.experts",
        tuple(f"{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in ("blocks", "scales", "bias")),
        {"gate_up_proj_blocks": "mxfp4_experts"}, experts=True),
})  # fmt: skip
METHODS = frozenset(one.method for one in LAYOUTS.values())  # quant_method of those that are read as they are
#: quant_method of layouts that are not read -> what reads it
LIBRARIES: Mapping[str, str] = {
    "aqlm": "transformers with the package aqlm", "auto-round": "transformers with the package auto-round",
    "autoround": "transformers with the package auto-round", "intel/auto-round": "the package auto-round",
    "bitblas": MODEL, "bitnet": "transformers itself", "eetq": "transformers with the package kernels",
    "exl2": "ExLlamaV2", "exl3": "ExLlamaV3", "fbgemm_fp8": "transformers with the package fbgemm-gpu",
    "fouroversix": "transformers with the package fouroversix",
    "fp_quant": "transformers with the package fp_quant", "higgs": "transformers with the package flute-kernel",
    "hqq": "transformers with the package hqq", "marlin": "vLLM", "metal": "transformers with the package kernels",
    "modelopt_fp4": "TensorRT-LLM, or vLLM,",
    "mxfp8": "transformers itself, on a GPU,",
    "nvfp4": "transformers with the package kernels", "qqq": MODEL,
    "quanto": "transformers with the package optimum-quanto", "quark": "transformers with the package amd-quark",
    "sinq": "transformers with the package sinq", "spqr": "transformers with the package spqr_quant",
    "torchao": "transformers with the package torchao", "vptq": "transformers with the package vptq",
}  # fmt: skip
#: formats of compressed-tensors that are not read -> what they are
FORMATS = {
    "mxfp8-quantized": "MXFP8 weights", "marlin-24": "2:4 sparse weights in Marlin's packing",
    "mixed-precision": "layers in several formats", "dense": "weights that are not compressed",
}  # fmt: skip
