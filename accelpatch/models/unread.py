"""What of checkpoints that others quantised is not read: what it is, and what reads it, by config.json alone.

A checkpoint could be read wrongly where its configuration says something that its tensors do not show: rotated inputs,
quantised activations, other bits for single layers. Sources: compressed-tensors 0.19, GPTQModel 7.7, auto-round 0.9,
transformers' quantizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FLOAT = "give the float checkpoint that it was made from"
TENSORS, MODEL = "transformers with the package compressed-tensors, or vLLM,", "GPTQModel"
#: quant_method -> what reads it
LIBRARIES: Mapping[str, str] = {
    "aqlm": "transformers with the package aqlm", "auto-round": "transformers with the package auto-round",
    "autoround": "transformers with the package auto-round", "intel/auto-round": "the package auto-round",
    "bitblas": MODEL, "bitnet": "transformers itself", "eetq": "transformers with the package kernels",
    "exl2": "ExLlamaV2", "exl3": "ExLlamaV3", "fbgemm_fp8": "transformers with the package fbgemm-gpu",
    "fouroversix": "transformers with the package fouroversix", "fp8": "transformers itself, on a GPU,",
    "fp_quant": "transformers with the package fp_quant", "higgs": "transformers with the package flute-kernel",
    "hqq": "transformers with the package hqq", "marlin": "vLLM", "metal": "transformers with the package kernels",
    "modelopt": "TensorRT-LLM, or vLLM,", "modelopt_fp4": "TensorRT-LLM, or vLLM,",
    "mxfp4": "transformers with the package kernels", "mxfp8": "transformers itself, on a GPU,",
    "nvfp4": "transformers with the package kernels", "qqq": MODEL,
    "quanto": "transformers with the package optimum-quanto", "quark": "transformers with the package amd-quark",
    "sinq": "transformers with the package sinq", "spqr": "transformers with the package spqr_quant",
    "torchao": "transformers with the package torchao", "vptq": "transformers with the package vptq",
}  # fmt: skip
#: formats of compressed-tensors that are read -> strategies of their weights
STRATEGIES = {
    "pack-quantized": ("group", "channel"), "int-quantized": ("channel", "tensor"),
    "float-quantized": ("channel", "tensor"),
}  # fmt: skip
FORMATS = {
    "nvfp4-pack-quantized": "NVFP4 weights", "mxfp4-pack-quantized": "MXFP4 weights",
    "mxfp8-quantized": "MXFP8 weights", "marlin-24": "2:4 sparse weights in Marlin's packing",
    "mixed-precision": "layers in several formats", "dense": "weights that are not compressed",
}  # fmt: skip
#: layouts of checkpoints/foreign.py -> what reads all of them
BY = {
    "gptq": "GPTQModel, or vLLM,", "awq": "GPTQModel, or vLLM,", **dict.fromkeys(STRATEGIES, TENSORS),
    **dict.fromkeys(("bitsandbytes-4bit", "bitsandbytes-8bit"), "transformers with the package bitsandbytes"),
}  # fmt: skip
MIXED = ("bits", "group_size", "sym", "data_type")  # of auto-round, for the model and for single layers


def reason(config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint with this quantization_config is not read, in one sentence; None where nothing here says so."""
    method = str(config.get("quant_method", "unknown"))
    if method in LIBRARIES:
        mixed = ", with other bits for single layers (extra_config)," if _mixed(config) else ""
        return _sentence(f"{method}{mixed}", LIBRARIES[method])
    if method == "compressed-tensors":
        return next((_sentence(f"compressed-tensors with {what}", TENSORS) for what in _compressed(config)), None)
    if method in ("gptq", "awq"):
        return next((_sentence(f"{method} with {what}", by) for what, by in _packed(config)), None)
    return None


def _sentence(what: str, library: str) -> str:
    return f"{what} is not read here; {library} reads it, or {FLOAT}"


def _packed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What GPTQ's and AWQ's tensors do not show, each with what reads it."""
    if config.get("dynamic"):
        yield "other bits for single layers, or layers left out (dynamic),", MODEL
    if _mixed(config):
        yield "auto-round's other bits for single layers (extra_config)", LIBRARIES["auto-round"]
    if config.get("rotation"):
        yield f"rotated inputs (rotation: {config['rotation']})", MODEL
    if config.get("adapter"):
        yield "an adapter of its own (adapter)", MODEL
    if config.get("is_marlin_format"):
        yield "weights in Marlin's packing (is_marlin_format)", "vLLM"
    if config.get("pack_dtype") not in (None, "int32", "torch.int32"):
        yield f"words of another size (pack_dtype: {config['pack_dtype']})", MODEL


def _mixed(config: Mapping[str, Any]) -> bool:
    """Whether auto-round gave a single layer another format; a layer of 16 bits or more is a float one."""
    layers = config.get("extra_config")
    if not isinstance(layers, dict):
        return bool(layers)
    for one in layers.values():
        if not isinstance(one, dict):
            return True
        bits = one.get("bits")
        if isinstance(bits, int) and bits >= 16:
            continue
        if any(name in one and one[name] != config.get(name, one[name]) for name in MIXED):
            return True
    return False


def _compressed(config: Mapping[str, Any]) -> Iterator[str]:
    """What compressed-tensors says that is not read."""
    transforms, cache, sparsity = (config.get(f"{name}_config") for name in ("transform", "kv_cache", "sparsity"))
    if transforms and (not isinstance(transforms, dict) or transforms.get("config_groups", True)):
        yield "rotated weights, whose inputs or outputs are rotated while the model runs (transform_config),"
    if config.get("kv_cache_scheme") or cache:
        yield "a quantised KV cache (kv_cache_scheme)"
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        yield f"sparse weights (sparsity_config: {sparsity['format']})"
    name, groups = str(config.get("format")), config.get("config_groups")
    kinds = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    if name not in STRATEGIES:
        yield f"{FORMATS.get(name, 'weights in another format')} (format: {name!r})"
    if not kinds:
        yield "no config_groups"
    if len(kinds) > 1 and name != "float-quantized":
        yield f"layers of {len(kinds)} schemes (config_groups)"
    for kind in kinds:
        yield from _scheme(name, kind)


def _scheme(name: str, kind: Mapping[str, Any]) -> Iterator[str]:
    """What one of the groups says that is not read in a format."""
    weights, inputs = (_said(kind, part) for part in ("weights", "input_activations"))
    if kind.get("format") not in (None, name):
        yield f"layers in several formats ({name}, {kind['format']})"
    if kind.get("output_activations"):
        yield "quantised outputs of layers (output_activations)"
    bits, size = weights.get("num_bits"), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in STRATEGIES[name]:
        due = " or ".join(STRATEGIES[name])
        yield f"weights by {strategy} (strategy) in the format {name}, where those by {due} are read,"
    if bits not in ((4, 8) if name == "pack-quantized" else (8,)):
        yield f"weights of {bits} bits in the format {name}"
    if (weights.get("type") or "int") != ("float" if name == "float-quantized" else "int"):
        yield f"weights of the type {weights['type']} in the format {name}"
    if name != "pack-quantized" and weights.get("symmetric") is False:
        yield f"asymmetric weights of 8 bits in the format {name}"
    if name == "pack-quantized" and inputs:
        yield f"quantised activations beside weights in the format {name} (input_activations)"
    if name != "pack-quantized":
        yield from _inputs(name, inputs)


def _said(kind: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = kind.get(part)
    return found if isinstance(found, dict) else {}


def _inputs(name: str, inputs: Mapping[str, Any]) -> Iterator[str]:
    if not inputs:
        yield f"float activations beside weights in the format {name} (input_activations: null)"
        return
    kind = "float" if name == "float-quantized" else "int"
    if inputs.get("num_bits") != 8 or (inputs.get("type") or kind) != kind:
        yield f"activations of {inputs.get('num_bits')} bits as {inputs.get('type')} in the format {name}"
    if (inputs.get("strategy") or "token") not in ("token", "tensor"):
        yield f"activations by {inputs['strategy']} (strategy) in the format {name}"
    if inputs.get("dynamic") not in (False, None) and inputs.get("symmetric") is False:
        yield "asymmetric activations"
