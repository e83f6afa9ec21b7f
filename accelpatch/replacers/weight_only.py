"""int8 and int4 weight-only linear layers; int8 also for an output head and the embedding tied to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries as built
from accelpatch.kernels.layouts import int4_tiles
from accelpatch.kernels.ops.linear import int8_linear, packed_linear, tiled_int4_linear
from accelpatch.kernels.spec import Spec
from accelpatch.models.family import EMBEDDING_CLASSES, LINEAR_CLASSES
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.weight_only import (
    Int4WeightOnlyLinear,
    Int8Embedding,
    Int8WeightOnlyLinear,
    quantized,
    renormalises,
)  # fmt: skip
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site
from accelpatch.quant import QuantizedWeight, int4, int8
from accelpatch.quant.weight import AnyWeight, OrderedWeight, check_held

INT8_SCALE = 4  # bytes per scale: float32
NATIVE = "cpu"  # the implementation over packs, the native CPU layout
CPU_LIBRARY = "cpu"
HIP = "hip"
ON_GPU = {
    "int4_linear": "tiled_int4_linear",
    "codebook_linear": "tiled_int4_linear",
}  # operation -> the one over the GPU kernels' layout
LIBRARIES = {"int8_linear": int8_linear.libraries, "tiled_int4_linear": tiled_int4_linear.libraries}
INT4_SCALE = 2  # bytes per scale: float16
OFFSET_BYTES = {"none": 0, "minimum": 2, "zero_point": 1}


def unfit(site: Site) -> str | None:
    """Why a site is neither a linear layer nor an embedding; None where it is one."""
    for member in (site, *site.tied):
        name = type(member.original).__name__
        if name not in LINEAR_CLASSES | EMBEDDING_CLASSES:
            return f"{name} is not known to be a plain linear layer"
        if member.n is None or not torch.empty(0, dtype=getattr(torch, member.dtype)).is_floating_point():
            return f"its weight is {member.dtype}, not a float matrix"
        if reason := renormalises(member.original):
            return reason
    return None


def weight_of(module: nn.Module) -> Tensor:
    """The float weight [N, K]; rows are output channels, or tokens of an embedding."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.detach().t() if type(module).__name__ == "Conv1D" else weight.detach()


def kernel_for(op: str, site: Site, device: Device, group_size: int, offset: str) -> tuple[str, str]:
    """The implementation that would run for one token, and why it is not a native one ("" where it is).

    Raises KernelError with every implementation's reason where none can run.
    """
    assert site.n is not None
    assert site.k is not None
    dtype = getattr(torch, site.dtype)
    packed = "packed_embedding" if op == "int8_embedding" else "packed_linear"
    spec = packed_linear.of_shape(site.n, site.k, dtype, group_size, offset, op=packed)
    reason = dispatch.why_not(packed, NATIVE, spec, device)
    if reason is None:
        return NATIVE, ""
    scale = torch.float32 if op != "int4_linear" else torch.float16
    spec = Spec(op, {"M": 1, "N": site.n, "K": site.k}, dtype, scale, group_size, offset)
    chosen = dispatch.choose(op, spec, device)
    if device.kind == "cpu":
        return chosen, f"no native CPU kernels: {reason}"
    own = replace(spec, op=ON_GPU.get(op, op))
    if HIP not in dispatch.kernel(own.op).implementations:
        return chosen, ""
    reason = dispatch.why_not(own.op, HIP, own, device)
    return (HIP, "") if reason is None else (chosen, f"{op} by {chosen}, not by the HIP kernels: {reason}")


def slower(kernel: str, device: Device) -> str:
    """Why a quantised weight makes a module slower: on a CPU without the native library torch dequantises it at every
    call. "" where a kernel reads it as it is."""
    if device.kind != "cpu" or kernel == NATIVE or (reason := built.why_not(CPU_LIBRARY, device)) is None:
        return ""
    return f"without native CPU kernels it would be slower than the original ({reason.partition(': ')[0]})"


def libraries(kernel: str, op: str, site: Site, device: Device, group_size: int, offset: str) -> tuple[str, ...]:
    """The device libraries that linear layers of a site, or tied to it, launch; none where other kernels run."""
    if device.kind == "cpu":
        return (CPU_LIBRARY,) if kernel == NATIVE else ()
    if all(isinstance(member.original, nn.Embedding) for member in (site, *site.tied)):
        return ()
    assert site.n is not None
    assert site.k is not None
    scale = torch.float16 if op == "tiled_int4_linear" else torch.float32
    spec = Spec(op, {"M": 1, "N": site.n, "K": site.k}, getattr(torch, site.dtype), scale, group_size, offset)
    return () if dispatch.why_not(op, HIP, spec, device) else LIBRARIES[op](spec, device)


def token_bytes(site: Site, resident: int) -> int:
    """Bytes read to decode one token: the whole weight of a linear layer, one row of an embedding, both where tied."""
    assert site.n is not None
    row = resident // site.n
    if isinstance(site.original, nn.Embedding):
        return row
    return resident + (row if any(isinstance(tied.original, nn.Embedding) for tied in site.tied) else 0)


class Int8WeightOnly(Replacer):
    """Symmetric int8, one float32 scale per output channel (group_size null) or per group of group_size along K.

    half_scales: float16 scales, where they hold the weight's. Of a list of group sizes the first that divides K and
    that the device's own kernels take is used; GPU kernels take null only.
    """

    name = "int8_weight_only"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "group_size": (int, list, type(None)),
        "half_scales": (bool,),
    }
    ties = True

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        if reason := unfit(site):
            return Reason(reason)
        assert site.n is not None
        assert site.k is not None
        wanted = options.get("group_size")
        groups = dividing(wanted, site.k)
        if not groups:
            return Reason(f"K = {site.k} is a multiple of none of the group sizes {wanted}")
        op = "int8_embedding" if isinstance(site.original, nn.Embedding) else "int8_linear"
        try:
            found = [(group, *kernel_for(op, site, device, group, "none")) for group in groups]
        except KernelError as error:
            return Reason(str(error))
        group, kernel, note = next((one for one in found if one[1] in (NATIVE, HIP)), found[0])
        half = bool(options.get("half_scales", False))
        scales = site.n * (site.k // group) * (INT4_SCALE if half else INT8_SCALE)
        resident = site.n * site.k + scales + bias_bytes(site)
        detail = {"group_size": group} | ({"half_scales": True} if half else {})
        return Choice(
            kernel, site.token_bytes, token_bytes(site, resident), resident, detail, note,
            libraries=libraries(kernel, "int8_linear", site, device, group, "none"), slower=slower(kernel, device),
        )  # fmt: skip

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        half = choice.detail.get("half_scales", False)
        weight = int8.quantize(weight_of(site.original), group_size=choice.detail["group_size"], half_scales=half)
        return _as_int8(site.original, weight, choice.kernel == NATIVE)

    def restore(self, site: Site, choice: Choice, held: QuantizedWeight | OrderedWeight) -> nn.Module:
        check_held(held, site.n, site.k, (torch.int8,), (torch.float32, torch.float16))
        if held.offset is not None:
            raise KernelError("an int8 weight has no offset")
        return _as_int8(site.original, held, choice.kernel == NATIVE)

    def build_tied(self, site: Site, tied: Site, built: nn.Module) -> nn.Module:
        assert isinstance(built, (Int8WeightOnlyLinear, Int8Embedding))
        return _as_int8(tied.original, built, built.packable)


def _as_int8(original: nn.Module, weight: AnyWeight | QuantizedModule, packable: bool) -> nn.Module:
    kind = Int8Embedding if isinstance(original, nn.Embedding) else Int8WeightOnlyLinear
    module: nn.Module = quantized(kind, original, weight, packable)
    return module


class Int4WeightOnly(Replacer):
    """4-bit weights in groups along K, with a float16 minimum, an integer zero point (zero_point), or symmetric."""

    name = "int4_weight_only"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "group_size": (int, list), "symmetric": (bool,), "zero_point": (bool,)
    }  # fmt: skip

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        if reason := unfit(site):
            return Reason(reason)
        if isinstance(site.original, nn.Embedding):
            return Reason("there is no 4-bit embedding; use int8_weight_only")
        assert site.n is not None
        assert site.k is not None
        wanted, symmetric = options.get("group_size", [128, 64, 32]), options.get("symmetric", False)
        zero_point, offset = options.get("zero_point", False), offset_of(options)
        if symmetric and zero_point:
            return Reason("symmetric and zero_point exclude each other: a symmetric weight has no offset")
        group = next(iter(dividing(wanted, site.k)), None)
        if group is None:
            return Reason(f"K = {site.k} is a multiple of none of the group sizes {wanted}")
        try:
            kernel, note = kernel_for("int4_linear", site, device, group, offset)
        except KernelError as error:
            return Reason(str(error))
        tables = site.n * (site.k // group) * (INT4_SCALE + OFFSET_BYTES[offset])
        resident = site.n * site.k // 2 + tables + bias_bytes(site)
        detail = {"group_size": group, "symmetric": symmetric} | ({"zero_point": True} if zero_point else {})
        return Choice(
            kernel, site.token_bytes, token_bytes(site, resident), resident, detail, note,
            libraries=libraries(kernel, "tiled_int4_linear", site, device, group, offset),
            slower=slower(kernel, device),
        )  # fmt: skip

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        return self._module(site, choice, int4.quantize(weight_of(site.original), **choice.detail))

    def restore(self, site: Site, choice: Choice, held: QuantizedWeight | OrderedWeight) -> nn.Module:
        check_held(
            held, site.n, site.k, (torch.int8,), (torch.float16, torch.float32), per_byte=2, zero_code=int4.ZERO_CODE
        )
        due, kind = offset_of(choice.detail), int4_tiles.kind_of(held.offset)
        if kind != due:
            raise KernelError(f"its offset is {kind}, and {due} belongs here: write the checkpoint again")
        return self._module(site, choice, held)

    def _module(self, site: Site, choice: Choice, weight: QuantizedWeight | OrderedWeight) -> nn.Module:
        module: nn.Module = quantized(Int4WeightOnlyLinear, site.original, weight, choice.kernel == NATIVE)
        return module


def dividing(wanted: int | list[int | None] | None, k: int) -> list[int]:
    """Those of the group sizes that divide K, in order; null becomes K, one group per row."""
    sizes = wanted if isinstance(wanted, list) else [wanted]
    exact = [k if size is None else size for size in sizes]
    return [size for size in exact if isinstance(size, int) and size > 0 and k % size == 0]


def offset_of(options: Mapping[str, Any]) -> str:
    """The kind of a 4-bit weight's offset, by a rule's options or a Choice's detail."""
    return "none" if options.get("symmetric") else "zero_point" if options.get("zero_point") else "minimum"


def bias_bytes(site: Site) -> int:
    """Bytes of the parameters that stay float: the bias, if the module owns one."""
    weight = weight_of(site.original)
    return max(0, site.bytes - weight.numel() * weight.element_size())
