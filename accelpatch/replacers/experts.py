"""A layer's experts: in their own precision by kernels that read the chosen ones, or as int8 or 4-bit codes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.codebooks import E4M3, E8M0, FP8_CODES, MXFP4_GROUP, NVFP4, NVFP4_GROUP
from accelpatch.kernels.layouts.expert_stack import BLOCK
from accelpatch.kernels.layouts.row_major import FP8_BLOCK, Fp8Rows, Int4Rows, Int8Rows
from accelpatch.kernels.ops.experts import experts, packed_experts
from accelpatch.kernels.ops.experts import gemv as expert_gemv
from accelpatch.kernels.spec import Spec
from accelpatch.models.family import ACTIVATION_CLASSES, CLAMPED_GATES
from accelpatch.modules.experts import DOWN, UP, ExpertsForm, floats, form_of, rows_of
from accelpatch.modules.quantized_experts import PARTS, WeightTensors, checked, quantised
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site
from accelpatch.quant import codebook, fp8, gptq, int4, int8
from accelpatch.replacers.calibrated import CALIBRATED, CalibratedReplacer, how_of
from accelpatch.replacers.proposing import KernelReplacer
from accelpatch.replacers.weight_kernels import CPU_LIBRARY, dividing, slower, stored_bytes

NATIVE, HIP, TRITON = "cpu", "hip", "triton"
Shapes = dict[str, tuple[int, int]]  # weight -> (N, K) of an expert


def described(site: Site) -> tuple[ExpertsForm, int, Shapes] | str:
    """(form, number of experts, shapes) of a site with experts, or why they are not known."""
    form = form_of(site.original, ACTIVATION_CLASSES, CLAMPED_GATES)
    if isinstance(form, str):
        return form
    if site.tied:
        return f"its weights are shared with {site.tied[0].path}"
    shapes: Shapes = {}
    number = 0
    for name in (UP, DOWN):
        weight = site.original._parameters[name]
        assert weight is not None
        if not weight.is_floating_point():
            return f"its {name} is {weight.dtype}, not a float"
        number, *size = weight.shape
        n, k = reversed(size) if form.transposed else size
        shapes[name] = (n, k)
    (up, width), (down, inner) = shapes[UP], shapes[DOWN]
    if up != 2 * inner or width != down:
        return f"its weights are {up} x {width} and {down} x {inner}, which are no gate, up and down"
    return form, number, shapes


def share(site: Site) -> float:
    """Share of a site's bytes that one token reads."""
    return site.token_bytes / site.bytes if site.bytes else 1.0


class FloatExpertsReplacer(Replacer):
    """Experts with their own weights (GPU only): a few tokens by kernels that read the chosen ones alone."""

    name = "experts"
    rounds = False

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        found = described(site)
        if isinstance(found, str):
            return Reason(found)
        form, number, shapes = found
        if device.kind == "cpu":
            return Reason("transformers' own experts are used on a CPU")
        if form.transposed or form.interleaved:
            return Reason(
                "its weights are transposed, which the kernels do not read: a recipe that rounds lays them out"
            )
        (_, width), (_, inner) = shapes[UP], shapes[DOWN]
        spec = experts.of_shape(
            number, width, inner, getattr(torch, site.dtype), 16, (width, inner), activation=form.activation
        )
        if reason := dispatch.why_not(experts.OP, TRITON, spec, device):
            return Reason(f"transformers' own experts are used: {reason}")
        return Choice(TRITON, site.token_bytes, site.token_bytes, site.bytes, spec=spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        form = form_of(site.original, ACTIVATION_CLASSES, CLAMPED_GATES)
        assert isinstance(form, ExpertsForm)
        return floats(site.original, form)


class _QuantizedExperts(CalibratedReplacer, KernelReplacer):
    """Base of the formats: groups of each of the two weights, the kernel, and the bytes."""

    whole = True
    bits: ClassVar[int]
    wanted: ClassVar[Any]  # group sizes, where a rule says none; a number: the only one that the format has
    dtypes: ClassVar[tuple[torch.dtype, ...]]  # of scales, the usual one first
    kind = "none"  # of offset, where no option says another; or what the codes are of
    row_bytes = 0  # of a factor of each row

    def offset(self, options: Mapping[str, Any]) -> str:
        """The kind of offset, or the name of the codebook."""
        return self.kind

    def scale_bytes(self, kernel: str) -> int:
        """Bytes of a scale as a kernel reads it."""
        return stored_bytes(self.dtypes[0], kernel)

    def quantized(self, weight: Tensor, group: int, choice: Choice) -> Fp8Rows | Int8Rows | Int4Rows:
        """One expert's matrix [N, K] in the format."""
        raise NotImplementedError

    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        found = described(site)
        if isinstance(found, str):
            return Reason(found)
        form, number, shapes = found
        wanted = options.get("group_size", self.wanted)
        widths = (shapes[UP][1], shapes[DOWN][1])
        each = [dividing(wanted, widths[0]), dividing(wanted, widths[1], site.whole_k)]
        for k, groups in zip(widths, each, strict=True):
            if not groups and isinstance(wanted, int):
                return Reason(f"K = {k} is not a multiple of {wanted}, the values that share a scale in its format")
            if not groups or (self.bits == 4 and k % 2):
                return Reason(f"K = {k} is odd, or a multiple of none of the group sizes {wanted}")
        offset = self.offset(options)
        tried = [(pair, *self._kernel(pair, found, site, device, offset)) for pair in itertools.product(*each)]
        pair, kernel, note, spec = next((one for one in tried if one[1] in (NATIVE, HIP, TRITON)), tried[0])
        resident = self._bytes(site, number, shapes, pair, kernel, offset)
        detail = {"groups": pair, "offset": offset, "form": form, "number": number, "shapes": shapes}
        detail |= how_of(options)
        libraries = expert_gemv.libraries(self._spec(pair, found, site, offset)) if kernel == HIP else ()
        after = round(resident * share(site))
        return Choice(
            kernel, site.token_bytes, after, resident, detail, note,
            libraries=(CPU_LIBRARY,) if kernel == NATIVE else libraries, slower=slower(kernel, device), spec=spec,
        )  # fmt: skip

    def _spec(self, groups: tuple[int, ...], found: tuple[ExpertsForm, int, Shapes], site: Site, offset: str) -> Spec:
        form, number, shapes = found
        (_, width), (_, inner) = shapes[UP], shapes[DOWN]
        return experts.of_shape(
            number, width, inner, getattr(torch, site.dtype), self.bits, (groups[0], groups[1]),
            activation=form.activation, offset=offset, biased=form.bias, scale_dtype=self.dtypes[0],
        )  # fmt: skip

    def _kernel(
        self, groups: tuple[int, ...], found: tuple[ExpertsForm, int, Shapes], site: Site, device: Device, offset: str
    ) -> tuple[str, str, Spec]:
        """The implementation that would run, why it is no fast one, and the call. Raises KernelError for none."""
        _, number, shapes = found
        (_, width), (_, inner) = shapes[UP], shapes[DOWN]
        dtype, pair = getattr(torch, site.dtype), (groups[0], groups[1])
        packed = packed_experts.of_shape(number, width, inner, dtype, self.bits, pair, offset)
        reason = dispatch.why_not(packed_experts.OP, NATIVE, packed, device)
        if device.kind == "cpu" and reason is None:
            return NATIVE, "", packed
        spec = self._spec(groups, found, site, offset)
        unfit = expert_gemv.why_not_tiles(spec, device)
        if unfit is None:
            return HIP, "", replace(spec, options={**spec.options, "tiled": True})
        chosen = dispatch.choose(experts.OP, spec, device)
        why = reason if device.kind == "cpu" else dispatch.why_not(experts.OP, TRITON, spec, device)
        if why is None and self.bits == 4:
            return chosen, f"experts by {chosen}, not by the HIP kernels: {unfit}", spec
        return chosen, f"experts by {chosen}: {why}" if why else "", spec

    def _bytes(self, site: Site, number: int, shapes: Shapes, groups: tuple[int, ...], kernel: str, offset: str) -> int:
        """Bytes of the replacement's tensors."""
        total = 0
        for (n, k), group in zip(shapes.values(), groups, strict=True):
            each = (4 if kernel == NATIVE and group == k else self.scale_bytes(kernel)) * (1 + (offset == "minimum"))
            columns = -(-k // BLOCK) * BLOCK if self.bits == 4 and kernel != NATIVE else k
            total += number * n * (columns * self.bits // 8 + k // group * each + self.row_bytes)
        biases = (one for name, one in site.original._parameters.items() if one is not None and name.endswith("_bias"))
        return total + sum(one.numel() * (4 if kernel == NATIVE else one.element_size()) for one in biases)

    @torch.no_grad()
    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        form, weights = choice.detail["form"], dict[str, WeightTensors]()
        made = None if stats is None else stats.rounded
        for name, group in zip((UP, DOWN), choice.detail["groups"], strict=True):
            weight = site.original._parameters[name]
            assert weight is not None
            rows = rows_of(form, name, weight.detach())
            parts = (
                stacked([self.quantized(one, group, choice) for one in rows]) if made is None else _parts(made, name)
            )
            bias = site.original._parameters.get(f"{name}_bias")
            bias_rows = None if bias is None else rows_of(form, f"{name}_bias", bias.detach()).clone()
            weights[name] = {**parts, "bias": bias_rows}
        return quantised(site.original, form, weights, self.bits, choice.kernel == NATIVE)

    def restore(self, site: Site, choice: Choice, saved: Mapping[str, Tensor]) -> nn.Module:
        weights = {name: {part: saved.get(f"{name}_{part}") for part in PARTS} for name in (UP, DOWN)}
        form, number, shapes = (choice.detail[key] for key in ("form", "number", "shapes"))
        only = self.wanted if isinstance(self.wanted, int) else None
        checked(weights, number, shapes, self.bits, form.bias, self.dtypes, only, self.kind)
        device = saved[f"{UP}_q"].device
        empty = torch.empty(0, dtype=getattr(torch, site.dtype), device=device)
        site.original._parameters[UP] = nn.Parameter(empty, requires_grad=False)
        new = quantised(site.original, form, weights, self.bits, choice.kernel == NATIVE)
        site.original._parameters.clear()  # they had no values
        return new

    def parts(self, site: Site, names: Iterable[str]) -> list[str]:
        """All tensors under the name of the experts."""
        return [name for name in names if name.startswith(f"{site.path}.")]


def _parts(made: Mapping[str, Tensor], name: str) -> dict[str, Tensor | None]:
    """The canonical tensors of one weight, out of those of a state dict."""
    return {part: made.get(f"{name}_{part}") for part in ("q", "scale", "offset")}


def stacked(weights: Sequence[Fp8Rows | Int8Rows | Int4Rows]) -> dict[str, Tensor | None]:
    """Canonical tensors of quantised weights as one, [E, N, ...]; scales in the widest of their dtypes."""
    scale = [one.scale for one in weights]
    dtype = torch.float32 if any(one.dtype == torch.float32 for one in scale) else scale[0].dtype
    wide = torch.float64 if dtype == E4M3 else dtype  # NVFP4's factors of rows
    offsets = [one.to(wide) for weight in weights if (one := weight.tensors().get("offset")) is not None]
    return {
        "q": torch.stack([one.w for one in weights]), "scale": torch.stack([one.to(dtype) for one in scale]),
        "offset": torch.stack(offsets) if offsets else None,
    }  # fmt: skip


class Int8Experts(_QuantizedExperts):
    """Symmetric int8; groups as int8_weight_only has them, of which GPU kernels take whole rows (null) only."""

    name = "int8_experts"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"group_size": (int, list, type(None)), **CALIBRATED}
    bits, wanted, dtypes = 8, [128, 64, 32, None], (torch.float32, torch.float16)

    def quantized(self, weight: Tensor, group: int, choice: Choice) -> Fp8Rows | Int8Rows | Int4Rows:
        return int8.quantize(weight, group_size=group)

    def grid(self, detail: Mapping[str, Any]) -> gptq.Grid:
        return int8.Int8Grid()


class Int4Experts(_QuantizedExperts):
    """4-bit codes in groups, as int4_weight_only has them."""

    name = "int4_experts"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"group_size": (int, list), "symmetric": (bool,), **CALIBRATED}
    bits, wanted, dtypes = 4, [128, 64, 32], (torch.float16, torch.float32)

    def offset(self, options: Mapping[str, Any]) -> str:
        return "none" if options.get("symmetric", False) else "minimum"

    def quantized(self, weight: Tensor, group: int, choice: Choice) -> Fp8Rows | Int8Rows | Int4Rows:
        return int4.quantize(weight, group_size=group, symmetric=choice.detail["offset"] == "none")

    def grid(self, detail: Mapping[str, Any]) -> gptq.Grid:
        return int4.Int4Grid(detail["offset"])


class MXFP4Experts(_QuantizedExperts):
    """4-bit codes of e2m1 with a power of two (E8M0) for each 32 values."""

    name = "mxfp4_experts"
    bits, wanted, dtypes, kind = 4, MXFP4_GROUP, (E8M0,), "e2m1"

    def quantized(self, weight: Tensor, group: int, choice: Choice) -> Fp8Rows | Int8Rows | Int4Rows:
        return codebook.quantize(weight, group_size=group, codebook=self.kind)


class NVFP4Experts(_QuantizedExperts):
    """4-bit codes of e2m1 with a scale in e4m3 for each 16 values, and a factor for each row."""

    name = "nvfp4_experts"
    bits, wanted, dtypes, kind, row_bytes = 4, NVFP4_GROUP, (E4M3,), NVFP4, 8

    def quantized(self, weight: Tensor, group: int, choice: Choice) -> Fp8Rows | Int8Rows | Int4Rows:
        return codebook.quantize(weight, group_size=group, codebook=self.kind)


class Fp8BlockExperts(_QuantizedExperts):
    """8-bit floats (e4m3) in blocks of 128 x 128, as DeepSeek-V3 and Qwen3 are published."""

    name = "fp8_block_experts"
    bits, wanted, dtypes, kind = 8, FP8_BLOCK, (torch.float32,), FP8_CODES

    def quantized(self, weight: Tensor, group: int, choice: Choice) -> Fp8Rows:
        return fp8.quantize_blocks(weight)


FORMATS: tuple[type[Replacer], ...] = (Int8Experts, Int4Experts, MXFP4Experts, NVFP4Experts, Fp8BlockExperts)
