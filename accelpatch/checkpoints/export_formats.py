"""What others' formats hold of a patched model's linear layers: which, in which groups, and what config.json says.

    compressed-tensors   int4, int8 (pack-quantized); w8a8 (int-quantized); fp8 (float-quantized); mxfp4, nvfp4
                         (..-pack-quantized); several at once
    gptq                 int3, int4 or int8, symmetric as v1, with zero points as v2 (v1 has them less one, which some
                         readers undo in whole words and some in each field)
    awq                  int4, GEMM
    fp8                  fp8 in blocks of 128 x 128, as transformers has DeepSeek-V3's

Groups of several sizes become ones of the largest size that divides them all, with repeated scales: the same weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.quant import fp8_blocks, packing
from accelpatch.quant.formats import weight_of

BITS = {"int3": 3, "int4": 4, "int8": 8}  # of kinds without quantised activations, in integers
KINDS = {
    "int3_weight_only": "int3", "int4_weight_only": "int4", "int8_weight_only": "int8", "w8a8": "w8a8",
    "w8a8_fp8": "fp8", "fp8_weight_only": "fp8 weights", "mxfp4_weight_only": "mxfp4", "nvfp4_weight_only": "nvfp4",
    "fp8_blocks": "fp8 blocks",
}  # fmt: skip
FLOATS = ("mxfp4", "nvfp4")  # kinds of 4-bit floats
BLOCKS = "fp8 blocks"  # the kind of fp8 in blocks of 128 x 128
ROWS = -1  # a group size: one scale a row
Parts = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Layer:
    """A quantised linear layer[n, k]. kind: a value of KINDS. zeros: whether it has zero points. static: whether its
    input has one scale. ordered: whether its columns are sorted by their groups. form: the dtype of its codes."""

    path: str
    kind: str
    n: int
    k: int
    group_size: int
    zeros: bool = False
    static: bool = False
    ordered: bool = False
    form: str = "I8"


@dataclass(frozen=True)
class Group:
    """Layers that a format describes alike. group_size: inputs, or ROWS."""

    kind: str
    paths: tuple[str, ...]
    group_size: int
    symmetric: bool
    static: bool
    ordered: bool


def groups_of(layers: Sequence[Layer]) -> list[Group]:
    """The layers by their kinds, and of w8a8 by whether inputs have one scale."""
    found: dict[tuple[str, bool], list[Layer]] = {}
    for layer in layers:
        found.setdefault((layer.kind, layer.static), []).append(layer)
    return [
        Group(
            kind, tuple(one.path for one in members),
            ROWS if all(one.group_size == one.k for one in members) else math.gcd(*(one.group_size for one in members)),
            not any(one.zeros for one in members), static, any(one.ordered for one in members),
        )
        for (kind, static), members in found.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A format. kinds: those that it holds. sizes: of its groups, () for any.

    multiple: by bits, what divides N; inputs_too: and K. single: whether all layers are of one kind. ordered: whether
    it has act-order. half: whether scales are float16. config: quantization_config of groups, and of the names of
    linear layers and of heads that stay float. tensors: of a layer of a group, by their names in it.
    """

    name: str
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    multiple: Mapping[int, int]
    inputs_too: bool
    single: bool
    ordered: bool
    half: bool
    config: Callable[[Sequence[Group], Sequence[str], Sequence[str]], dict[str, Any]]
    tensors: Callable[[Parts, Group, torch.dtype], dict[str, Tensor]]

    def why_not(self, layers: Sequence[Layer], groups: Sequence[Group]) -> str | None:
        """Why these layers cannot be written so; None where they can."""
        for layer in layers:
            if reason := self._unfit(layer):
                return f"{layer.path} {reason}"
        if self.single and len(groups) > 1:
            kinds = " and ".join(sorted({one.kind for one in groups}))
            return f"there are layers of {kinds}, and {self.name} has one kind: compressed-tensors has several"
        for group in groups:
            if self.sizes and group.group_size not in self.sizes:
                known = ", ".join(str(size) for size in self.sizes if size != ROWS)
                return f"groups of {group.group_size} inputs are not in {self.name}, which has {known}, or one a row"
        return None

    def _unfit(self, layer: Layer) -> str | None:
        if layer.kind not in self.kinds:
            others = [one.name for one in FORMATS.values() if layer.kind in one.kinds]
            said = f"{' and '.join(others)} {'do' if len(others) > 1 else 'does'}"
            return f"is {layer.kind}, and {self.name} holds {', '.join(self.kinds)}: {said}"
        if layer.form not in ("I8", "F8_E4M3"):
            return f"has codes in {layer.form}, and {self.name} has e4m3 in OCP's form: quantise for another arch"
        if layer.ordered and not self.ordered:
            return f"has its columns sorted by act-order, which {self.name} does not have: gptq does"
        due = self.multiple.get(BITS.get(layer.kind, 0), 1)
        if layer.n % due or (self.inputs_too and layer.k % due):
            return f"is {[layer.n, layer.k]}, and {self.name} packs {due} at a time: compressed-tensors takes any"
        return None


def _coded(parts: Parts, group: Group) -> packing.Coded:
    weight = weight_of(group.kind, parts)
    return packing.coded(weight, None if group.group_size == ROWS else group.group_size)


def _gptq_config(groups: Sequence[Group], kept: Sequence[str], heads: Sequence[str]) -> dict[str, Any]:
    (group,) = groups
    form = "gptq" if group.symmetric else "gptq_v2"
    facts = {
        "quant_method": "gptq", "bits": BITS[group.kind], "group_size": group.group_size, "sym": group.symmetric,
        "desc_act": group.ordered, "checkpoint_format": form, "format": form, "lm_head": False, "pack_dtype": "int32",
    }  # fmt: skip
    return facts | ({"dynamic": {f"-:^{re.escape(name)}$": {} for name in kept}} if kept else {})


def _awq_config(groups: Sequence[Group], kept: Sequence[str], heads: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": groups[0].group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": [*kept, *heads] or None,
    }  # fmt: skip


def _tensors_of_compressed(parts: Parts, group: Group, dtype: torch.dtype) -> dict[str, Tensor]:
    if group.kind in BITS:
        return packing.pack_quantized(_coded(parts, group), dtype, group.symmetric)
    q, scale = parts["q"], parts["scale"]
    assert q is not None
    assert scale is not None
    if group.kind in FLOATS:
        return packing.four_bit_floats(q, scale, parts.get("offset"))
    return packing.rows(q, scale, parts.get("input_scale"), dtype)


#: kind -> (format, type of the codes); whether activations are rounded too
OF_COMPRESSED = {
    "int4": ("pack-quantized", "int"), "int8": ("pack-quantized", "int"), "w8a8": ("int-quantized", "int"),
    "fp8": ("float-quantized", "float"), "fp8 weights": ("float-quantized", "float"),
    "mxfp4": ("mxfp4-pack-quantized", "float"), "nvfp4": ("nvfp4-pack-quantized", "float"),
}  # fmt: skip
ACTIVATIONS = ("w8a8", "fp8")


def _compressed_config(groups: Sequence[Group], kept: Sequence[str], heads: Sequence[str]) -> dict[str, Any]:
    formats = {OF_COMPRESSED[one.kind][0] for one in groups}
    every = len(groups) == 1
    return {
        "quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
        "ignore": [*kept, *heads],
        "config_groups": {f"group_{place}": _scheme(one, every) for place, one in enumerate(groups)},
    }  # fmt: skip


def _scheme(group: Group, every: bool) -> dict[str, Any]:
    """A config group. every: whether it has all linear layers but the ignored ones."""
    form, kind = OF_COMPRESSED[group.kind]
    common = {"num_bits": BITS.get(group.kind, 4 if group.kind in FLOATS else 8), "type": kind}
    weights = {**common, "strategy": "channel", "group_size": None, "symmetric": group.symmetric, "dynamic": False}
    if group.kind in BITS and group.group_size != ROWS:
        weights |= {"strategy": "group", "group_size": group.group_size}
    if group.kind in FLOATS:
        whole = group.kind == "nvfp4"
        weights |= {"strategy": "tensor_group" if whole else "group", "group_size": group.group_size}
        weights |= {"scale_dtype": "torch.float8_e4m3fn" if whole else "torch.uint8"}
    if group.ordered:
        weights["actorder"] = "group"
    inputs = None
    if group.kind in ACTIVATIONS:
        strategy = "tensor" if group.static else "token"
        inputs = {**common, "strategy": strategy, "group_size": None, "symmetric": True, "dynamic": not group.static}
    targets = ["Linear"] if every else list(group.paths)
    return {"targets": targets, "weights": weights, "input_activations": inputs, "output_activations": None,
            "format": form}  # fmt: skip


def _blocks_config(groups: Sequence[Group], kept: Sequence[str], heads: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [*kept, *heads] or None,
    }  # fmt: skip


FORMATS: Mapping[str, Format] = {
    "compressed-tensors": Format(
        "compressed-tensors", tuple(OF_COMPRESSED), (), {}, inputs_too=False, single=False, ordered=True, half=False,
        config=_compressed_config, tensors=_tensors_of_compressed,
    ),
    "gptq": Format(
        "gptq", ("int3", "int4", "int8"), (ROWS, 16, 32, 64, 128, 256, 512, 1024), {3: 32, 4: 8, 8: 4}, inputs_too=True,
        single=True, ordered=True, half=True, config=_gptq_config,
        tensors=lambda parts, group, dtype: packing.gptq(_coded(parts, group), group.symmetric),
    ),
    "awq": Format(
        "awq", ("int4",), (ROWS, 16, 32, 64, 128), {4: 8}, inputs_too=False, single=True, ordered=False, half=True,
        config=_awq_config, tensors=lambda parts, group, dtype: packing.awq(_coded(parts, group)),
    ),
    "fp8": Format(
        "fp8", (BLOCKS,), (), {}, inputs_too=False, single=True, ordered=False, half=False, config=_blocks_config,
        tensors=lambda parts, group, dtype: fp8_blocks.packed(weight_of(group.kind, parts)),
    ),
}  # fmt: skip
