"""Modules of other libraries with a quantised weight: a table from their classes to what reads them.

They are known by the name of their class and their tensors; none of the libraries is imported. Layouts of tensors:
quant/packed_formats.py and quant/bitsandbytes_formats.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError
from accelpatch.patching.replacer import Choice
from accelpatch.patching.stored import Stored, bias_of
from accelpatch.quant import bitsandbytes_formats, fp8, packed_formats
from accelpatch.quant.formats import dequantize
from accelpatch.quant.packed_formats import FP8
from accelpatch.quant.packing import LESS_ONE
from accelpatch.replacers import compressed

Tensors = Mapping[str, Tensor | None]
AT_FIRST_CALL = "GPTQModel packs it anew at its first call"
REPACKS = "bitsandbytes packs it anew for a CPU at its first call, and rounds its scales"
UNPACKS = "compressed-tensors unpacks it at its first call"
PACKED_ANEW = "it has been packed anew at its first call: patch the model before it runs"
HAS_ADAPTER = "an adapter of GPTQModel's own is in it: merge it first"
ROTATES = "it rotates its input"
MIDDLES = {4: 0x88888888, 8: 0x80808080}  # words of zero points that are the middle of the codes
SHUFFLED = ("exllama", "exllamav2", "marlin", "qigen")  # AutoGPTQ's kernels that pack codes anew in their place


@dataclass(frozen=True)
class Layout:
    """How a library's class holds a weight.

    parts: names of its tensors, the first of which always exists. facts: makes the Stored of a module, and the `config`
    that the reader needs. reader: makes the canonical weight. tensors: finds the parts, where they are neither
    parameters nor buffers.
    """

    parts: tuple[str, ...]
    facts: Callable[[nn.Module, Tensors], tuple[Stored, Mapping[str, Any]]]
    reader: Callable[[Tensors, Mapping[str, Any], int, int], Any]
    tensors: Callable[[nn.Module], Tensors] | None = None

    def of(self, module: nn.Module) -> Tensors:
        """The parts that a module has, by name."""
        if self.tensors is not None:
            return self.tensors(module)
        tensors = {**module._buffers, **module._parameters}
        return {name: tensors.get(name) for name in self.parts}


def stored_of(module: nn.Module) -> Stored | None:
    """The description of a module whose weight another library quantised; None for all other modules."""
    name = type(module).__name__
    if name in OTHERS:
        own = f"in the packing of {OTHERS[name]}'s {name}, which is not read: load the model with plain kernels"
        return Stored(OTHERS[name], *_sizes(module), refusal=own)
    layout = COMPRESSED if name == "Linear" and "quantization_scheme" in vars(module) else TABLE.get(name)
    if layout is None:
        return None
    tensors = layout.of(module)
    if layout is COMPRESSED and all(tensors[part] is None for part in ("weight_packed", "weight_scale")):
        return None
    found, config = layout.facts(module, tensors)
    if found.refusal is None and any(isinstance(child, nn.Module) for child in module._modules.values()):
        found = replace(found, refusal=f"it has modules inside ({next(iter(module._modules))})")
    every = [tensor for tensor in (*tensors.values(), bias_of(module)) if tensor is not None]
    weight = partial(_weight, layout, config, found.n, found.k)
    return replace(found, bytes=sum(one.nbytes for one in every), weight=weight, floats=partial(_floats, weight))


def _weight(layout: Layout, config: Mapping[str, Any], n: int, k: int, module: nn.Module) -> Any:
    """The canonical weight. Raises KernelError, which begins with the name of a tensor that is wrong."""
    tensors = layout.of(module)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_meta:
            raise KernelError(f"{name} is on the meta device: load the model with its weights in memory")
    with torch.no_grad():
        return layout.reader(tensors, config, n, k)


def _floats(weight: Callable[[nn.Module], Any], module: nn.Module) -> Tensor:
    return dequantize(weight(module))


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(n, k) of a linear layer; AutoGPTQ's have names of their own."""
    attributes: Any = vars(module)
    n, k = (attributes.get(f"{way}_features", attributes.get(f"{way}features", 0)) for way in ("out", "in"))
    return int(n), int(k)


def _grouped(tool: str, bits: Any, groups: int, symmetric: bool, sizes: tuple[int, int], **more: Any) -> Stored:
    """A weight of 4 or 8 bits in so many groups along K."""
    n, k = sizes
    group = k // groups if groups > 0 else 0
    format_name = f"{tool} {bits} bits, " + ("one scale a row" if groups == 1 else f"groups of {group}")
    if bits not in (4, 8):
        return Stored(format_name, n, k, refusal=f"{bits} bits are not read: 4 and 8 are")
    if bits == 8:
        return Stored(format_name, n, k, replacer="int8_weight_only", options={"group_size": group}, **more)
    options = {"group_size": group} | ({"symmetric": True} if symmetric else {"zero_point": True})
    return Stored(format_name, n, k, replacer="int4_weight_only", options=options, **more)


def _gptq(module: nn.Module, tensors: Tensors) -> tuple[Stored, Mapping[str, Any]]:
    attributes: Any = vars(module)
    scales, bits, kernel = tensors["scales"], attributes.get("bits"), getattr(module, "QUANT_TYPE", "")
    version = str(getattr(attributes.get("format"), "value", attributes.get("format") or "gptq"))
    # GPTQModel turns v1 into v2 when it loads, for kernels that need that, and marks it so; AutoGPTQ never does
    v2 = version == "gptq_v2" or attributes.get("_qzeros_format") == 2 or getattr(module, "REQUIRES_FORMAT_V2", False)
    sym = bool(attributes["sym"]) if attributes.get("sym") is not None else _are_middles(tensors["qzeros"], bits, v2)
    config = {"bits": bits, "sym": sym, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    repacks = "linear_mode" in attributes
    refusal = HAS_ADAPTER if attributes.get("adapter") is not None else None
    refusal = PACKED_ANEW if attributes.get("linear_mode") is not None else refusal
    refusal = ROTATES if attributes.get("online_full_had") or attributes.get("online_partial_had") else refusal
    if version not in ("gptq", "gptq_v2"):
        refusal = f"its format {version} is not read"
    if kernel in SHUFFLED:
        refusal = f"in the packing of AutoGPTQ's {kernel}, which is not read: load the model with plain kernels"
    groups = 0 if scales is None or scales.dim() != 2 else len(scales)
    formula_reason = AT_FIRST_CALL if repacks else ""
    return _grouped("GPTQ", bits, groups, sym, _sizes(module), refusal=refusal, formula_reason=formula_reason), config


def _are_middles(words: Tensor | None, bits: Any, v2: bool) -> bool:
    """Whether all zero points of GPTQ are the middle of the codes: AutoGPTQ's layers do not say whether they are."""
    if words is None or words.is_meta or bits not in MIDDLES:
        return True
    return bool((words.long() & 0xFFFFFFFF == MIDDLES[bits] - (0 if v2 else LESS_ONE[bits])).all())


def _awq(version: str, module: nn.Module, tensors: Tensors) -> tuple[Stored, Mapping[str, Any]]:
    attributes: Any = vars(module)
    (n, k), size, bits = _sizes(module), attributes.get("group_size"), attributes.get("w_bit", attributes.get("bits"))
    size = k if size in (-1, None) else size
    refusal = HAS_ADAPTER if attributes.get("adapter") is not None else None
    refusal = PACKED_ANEW if attributes.get("linear_mode") is not None else refusal
    groups, formula_reason = k // size if size > 0 else 0, AT_FIRST_CALL if "linear_mode" in attributes else ""
    found = _grouped("AWQ", bits, groups, False, (n, k), refusal=refusal, formula_reason=formula_reason)
    return found, {"bits": bits, "group_size": size, "version": version}


def _llm_int8(module: nn.Module, tensors: Tensors) -> tuple[Stored, Mapping[str, Any]]:
    weight, (n, k) = tensors["weight"], _sizes(module)
    refusal = None
    if weight is not None and weight.dtype != torch.int8:
        refusal = f"its weight is still {weight.dtype}: move the model to its device first, which quantises it"
    options = {"group_size": None}
    found = Stored("LLM.int8()", n, k, replacer="int8_weight_only", options=options, refusal=refusal, lost=("state",))
    return found, {}


def _of_llm_int8(module: nn.Module) -> Tensors:
    """bitsandbytes has SCB as an attribute of the weight, and after the first call in the module's state."""
    weight, state = module._parameters.get("weight"), vars(module).get("state")
    of_weight = getattr(weight, "SCB", None)
    return {"weight": weight, "SCB": getattr(state, "SCB", None) if of_weight is None else of_weight}


def _of_four_bits(module: nn.Module) -> Tensors:
    """The tensors of bitsandbytes' 4 bits under the names that files have, as its quant_state holds them."""
    weight = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    if state is None:
        return {"weight": weight}
    facts = {
        "quant_type": state.quant_type, "blocksize": state.blocksize, "shape": list(state.shape),
        "dtype": str(state.dtype).removeprefix("torch."),
    }  # fmt: skip
    parts = {"weight": weight, "weight.absmax": state.absmax, "weight.quant_map": state.code}
    if state.nested:
        facts |= {
            "nested_blocksize": state.state2.blocksize,
            "nested_offset": 0.0 if state.offset.is_meta else float(state.offset),
        }
        parts |= {"weight.nested_absmax": state.state2.absmax, "weight.nested_quant_map": state.state2.code}
    text = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    return parts | {f"weight.quant_state.bitsandbytes__{state.quant_type}": text}


def _four_bits(module: nn.Module, tensors: Tensors) -> tuple[Stored, Mapping[str, Any]]:
    weight, (n, k) = module._parameters.get("weight"), _sizes(module)
    state = getattr(weight, "quant_state", None)
    if weight is None or state is None:
        why = "its weight is still float: move the model to its device first, which quantises it"
        return Stored("bitsandbytes 4 bits", n, k, refusal=why), {}
    format_name = f"bitsandbytes {state.quant_type}, blocks of {state.blocksize}" + (", nested" if state.nested else "")
    formula_reason = REPACKS if weight.device.type == "cpu" else ""
    if getattr(state, "packing_format_for_cpu", False):
        return Stored(format_name, n, k, refusal=f"{PACKED_ANEW}, or load it again"), {}
    # blocks go on from row to row, and long ones are split
    options = {"group_size": math.gcd(k, state.blocksize, bitsandbytes_formats.LARGEST)}
    return Stored(
        format_name, n, k, replacer=f"{state.quant_type}_weight_only", options=options, formula_reason=formula_reason
    ), {}


def _compressed(module: nn.Module, tensors: Tensors) -> tuple[Stored, Mapping[str, Any]]:
    scheme: Any = vars(module).get("quantization_scheme")
    weights, inputs = getattr(scheme, "weights", None), getattr(scheme, "input_activations", None)
    name, sizes = "compressed-tensors", _sizes(module)
    theirs: dict[str, Any] = {"own_forward": True, "formula_reason": UNPACKS, "unpacked_by": "ct_decompress_hook"}
    if weights is None:
        return Stored(name, *sizes, refusal="it does not say how its weight is quantised"), {}
    bits, scale, why = weights.num_bits, tensors["weight_scale"], compressed.refusal(module, scheme, tensors, sizes[0])
    if why is not None:
        return Stored(name, *sizes, refusal=why), {}
    if tensors["weight_packed"] is not None:
        groups = 0 if scale is None or scale.dim() != 2 else scale.shape[1]
        return _grouped(name, bits, groups, bool(weights.symmetric), sizes, **theirs), {"bits": bits}
    q, static = tensors["weight"], inputs is not None and inputs.dynamic is False
    kind = "int8" if q is not None and q.dtype == torch.int8 else "8-bit float"
    format_name = f"{name} {kind} weights" + (" and activations" if inputs is not None else "")
    if q is None or q.dtype not in (torch.int8, *FP8) or scale is None or scale.numel() not in (1, sizes[0]):
        refusal = "this is not read: weights by channel or tensor, int8 or e4m3, are"
        return Stored(format_name, *sizes, refusal=refusal), {}
    floats = kind != "int8"
    by = {(False, False): "int8_weight_only", (False, True): "w8a8", (True, False): "fp8_weight_only"}
    replacer = by.get((floats, inputs is not None), "w8a8_fp8")
    more = {"group_size": None} if replacer == "int8_weight_only" else {}
    why_not = partial(_same_form, q.dtype) if floats else lambda choice: None
    return Stored(format_name, *sizes, replacer=replacer, options=more, why_not=why_not, **theirs), {"static": static}


def _same_form(dtype: torch.dtype, choice: Choice) -> str | None:
    """Why codes of one form of 8-bit floats cannot run where a device takes the other; None where they can."""
    if fp8.dtype_of(fnuz=choice.detail["fnuz"]) == dtype:
        return None
    return f"its codes are {dtype}, and {choice.detail['arch']} takes the other form of 8-bit floats"


def _read_compressed(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Any:
    return (packed_formats.packed if "bits" in config else packed_formats.rows)(tensors, config, n, k)


GPTQ = Layout(("qweight", "qzeros", "scales", "g_idx"), _gptq, packed_formats.gptq)
AWQ_GEMM, AWQ_GEMV = (
    Layout(("qweight", "qzeros", "scales"), partial(_awq, version), packed_formats.awq) for version in ("gemm", "gemv")
)
LLM_INT8 = Layout(("weight", "SCB"), _llm_int8, bitsandbytes_formats.int8, tensors=_of_llm_int8)
FOUR_BITS = Layout(("weight",), _four_bits, bitsandbytes_formats.four_bits, tensors=_of_four_bits)
COMPRESSED = Layout(
    ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight", "input_scale",
     "input_zero_point"),
    _compressed, _read_compressed,
)  # fmt: skip
#: class -> its layout; compressed-tensors' modules are nn.Linear itself
TABLE: Mapping[str, Layout] = {
    "Linear8bitLt": LLM_INT8, "Linear4bit": FOUR_BITS, "LinearNF4": FOUR_BITS, "LinearFP4": FOUR_BITS,
    # GPTQModel and AutoGPTQ
    "TorchLinear": GPTQ, "TritonV2Linear": GPTQ, "TorchFusedLinear": GPTQ, "TorchAtenLinear": GPTQ,
    "TorchCpuAvx512Linear": GPTQ, "TorchQuantLinear": GPTQ, "TritonV2QuantLinear": GPTQ, "QuantLinear": GPTQ,
    # AutoAWQ and GPTQModel
    "WQLinear_GEMM": AWQ_GEMM, "WQLinear_GEMV": AWQ_GEMV, "AwqTorchLinear": AWQ_GEMM, "AwqGEMMLinear": AWQ_GEMM,
    "AwqGEMMTritonLinear": AWQ_GEMM, "AwqGEMVLinear": AWQ_GEMV,
    "CompressedLinear": COMPRESSED,
}  # fmt: skip
#: class -> library, of those that pack the weight for a kernel of theirs when they are loaded
OTHERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("MarlinLinear", "MarlinQuantLinear", "ExllamaV2Linear", "ExllamaV2QuantLinear", "ExllamaQuantLinear",
         "MacheteLinear", "BitblasLinear", "TorchInt8Linear", "AwqMarlinLinear", "AwqExllamaV2Linear",
         "AwqMacheteLinear", "AwqGEMVFastLinear", "TorchFusedAwqLinear", "TorchAtenAwqLinear"), "GPTQModel"),
    **dict.fromkeys(("WQLinear_GEMVFast", "WQLinear_Marlin", "WQLinear_Exllama", "WQLinear_ExllamaV2",
                     "WQLinear_IPEX"), "AutoAWQ"),
}  # fmt: skip
