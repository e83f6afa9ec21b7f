"""What of checkpoints that others quantised is not read: what it is, and what reads it, by config.json alone.

A checkpoint could be read wrongly where its configuration says something that its tensors do not show: rotated inputs,
quantised activations, other bits for single layers. Sources: compressed-tensors 0.19, GPTQModel 7.7, auto-round 0.9,
transformers' quantizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelpatch.models.foreign_layouts import FORMATS, LAYOUTS, LIBRARIES, MODEL, TENSORS, Scheme

FLOAT = "give the float checkpoint that it was made from"
SCHEMES = {name: one.scheme for name, one in LAYOUTS.items() if one.scheme is not None}
NVFP4 = ("NVFP4", "W4A16_NVFP4")  # quant_algo of modelopt
MIXED = ("bits", "group_size", "sym", "data_type")  # of auto-round, for the model and for single layers


def reason(config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint with this quantization_config is not read, in one sentence; None where nothing here says so."""
    method = str(config.get("quant_method", "unknown"))
    if method in LIBRARIES:
        mixed = ", with other bits for single layers (extra_config)," if _mixed(config) else ""
        return _sentence(f"{method}{mixed}", LIBRARIES[method])
    if method == "compressed-tensors":
        return next((_sentence(f"compressed-tensors with {what}", TENSORS) for what in _compressed(config)), None)
    if method == "fp8" and list(config.get("weight_block_size") or ()) != [128, 128]:
        size = config.get("weight_block_size")
        return _sentence(f"fp8 with weight_block_size {size}", LAYOUTS["fp8"].library)
    if method == "modelopt" and config.get("quant_algo") not in NVFP4:
        return _sentence(f"modelopt with quant_algo {config.get('quant_algo')!r}", LAYOUTS["modelopt"].library)
    if method in ("gptq", "awq"):
        return next((_sentence(f"{method} with {what}", by) for what, by in _packed(config)), None)
    return None


def _sentence(what: str, library: str) -> str:
    return f"{what} is not read here; {library} reads it, or {FLOAT}"


def _packed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What GPTQ's and AWQ's tensors do not show, each with what reads it."""
    rules = config.get("dynamic") or {}
    left_out = config.get("quant_method") == "gptq" and all(str(one).startswith("-:") for one in rules)
    if rules and not left_out:  # GPTQ's layers that are left out are float, which their tensors show
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
    if name not in SCHEMES:
        yield f"{FORMATS.get(name, 'weights in another format')} (format: {name!r})"
    if not kinds:
        yield "no config_groups"
    if len(kinds) > 1 and name != "float-quantized":
        yield f"layers of {len(kinds)} schemes (config_groups)"
    if len({bool(_said(kind, "input_activations")) for kind in kinds}) > 1:
        yield "activations of 8 bits in some layers and floats in others (input_activations)"
    for kind in kinds if name in SCHEMES else ():
        yield from _scheme(name, SCHEMES[name], kind)


def _scheme(name: str, read: Scheme, kind: Mapping[str, Any]) -> Iterator[str]:
    """What one of the groups says that is not read in a format."""
    weights, inputs = (_said(kind, part) for part in ("weights", "input_activations"))
    if kind.get("format") not in (None, name):
        yield f"layers in several formats ({name}, {kind['format']})"
    if kind.get("output_activations"):
        yield "quantised outputs of layers (output_activations)"
    bits, size = weights.get("num_bits"), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in read.strategies:
        due = " or ".join(read.strategies)
        yield f"weights by {strategy} (strategy) in the format {name}, where those by {due} are read,"
    if bits not in read.bits:
        yield f"weights of {bits} bits in the format {name}"
    if (weights.get("type") or "int") != read.type:
        yield f"weights of the type {weights.get('type')} in the format {name}"
    if read.group_size not in (None, size):
        yield f"groups of {size} in the format {name}"
    if (read.activations or read.type == "float") and weights.get("symmetric") is False:
        yield f"asymmetric weights of {bits} bits in the format {name}"
    if inputs and not read.activations and not read.floats:
        yield f"quantised activations beside weights in the format {name} (input_activations)"
    if read.activations and (inputs or read.type == "int"):  # weights in 8-bit floats may be quantised alone
        yield from _inputs(name, read.type, inputs)


def _said(kind: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = kind.get(part)
    return found if isinstance(found, dict) else {}


def _inputs(name: str, kind: str, inputs: Mapping[str, Any]) -> Iterator[str]:
    if not inputs:
        yield f"float activations beside weights in the format {name} (input_activations: null)"
        return
    if inputs.get("num_bits") != 8 or (inputs.get("type") or kind) != kind:
        yield f"activations of {inputs.get('num_bits')} bits as {inputs.get('type')} in the format {name}"
    if (inputs.get("strategy") or "token") not in ("token", "tensor"):
        yield f"activations by {inputs['strategy']} (strategy) in the format {name}"
    if inputs.get("dynamic") not in (False, None) and inputs.get("symmetric") is False:
        yield "asymmetric activations"
