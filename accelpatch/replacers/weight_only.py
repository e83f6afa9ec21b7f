"""Weight-only linear layers: int8, 4 bits and codebooks; int8 also for an output head and the embedding tied to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.codebooks import E4M3, E8M0, MXFP4_GROUP, NVFP4, NVFP4_GROUP
from accelpatch.kernels.layouts.row_major import Int3Rows, Int4Rows, Int8Rows, RowMajor
from accelpatch.modules.quantized_linear import (
    CodebookLinear,
    Int3WeightOnlyLinear,
    Int4WeightOnlyLinear,
    Int8Embedding,
    Int8WeightOnlyLinear,
    NVFP4Linear,
    quantized,
)  # fmt: skip
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.quant import codebook, gptq, int3, int4, int8
from accelpatch.quant.smoothing import SiteStatistics
from accelpatch.quant.weight import check_input_scale, check_weight
from accelpatch.replacers.calibrated import CALIBRATED, CalibratedReplacer, how_of
from accelpatch.replacers.proposing import LinearReplacer
from accelpatch.replacers.weight_kernels import (
    BITS,
    HIP,
    INT4_SCALE,
    INT8_SCALE,
    NATIVE,
    ON_GPU,
    bias_bytes,
    dividing,
    kernel_for,
    libraries,
    slower,
    stored_bytes,
    token_bytes,
    weight_of,
)

NO_GPU_KERNEL = "no GPU kernel reads it here, and torch would dequantise the weight at every call: use int4 there"
OFFSET_BYTES = {"none": 0, "minimum": 2, "zero_point": 1}


class WeightOnly(CalibratedReplacer, LinearReplacer):
    """Base of the formats with scales along K: which group size, by which kernel, and the bytes.

    Of a list of group sizes the first that divides K and that the device's own kernels take is used.
    """

    fusable = True
    no_table: ClassVar[str | None] = "there is no 4-bit embedding; use int8_weight_only"
    module: ClassVar[type[QuantizedModule]]
    table: ClassVar[type[QuantizedModule] | None] = None  # of embeddings
    op: ClassVar[str]
    wanted: ClassVar[Any] = None  # group sizes, where a rule says none; a number: the only one
    dtypes: ClassVar[tuple[torch.dtype, ...]]  # of scales, the usual one first
    codes: ClassVar[str] = ""
    row_bytes: ClassVar[int] = 0  # of each row, besides its scales

    def quantized(self, weight: Tensor, detail: Mapping[str, Any]) -> RowMajor:
        """A float weight [N, K] in the format."""
        raise NotImplementedError

    def kept(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the detail of a Choice says of the options, besides the group size. Raises KernelError."""
        return {}

    def kind(self, detail: Mapping[str, Any]) -> str:
        """The kind of offset, or the name of the codebook."""
        return self.codes or "none"

    def scale_bytes(self, detail: Mapping[str, Any], kernel: str) -> int:
        """Bytes of a group's scale and offset as a kernel reads them."""
        return stored_bytes(self.dtypes[0], kernel)

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        wanted, bits = options.get("group_size", self.wanted), BITS[self.op]
        groups = dividing(wanted, k, site.whole_k)
        if not groups:
            return Reason(f"K = {k} is a multiple of none of the group sizes {wanted}")
        if k * bits % 8 or (bits == 3 and k % 8):
            return Reason(f"K = {k} values of {bits} bits do not fill whole bytes")
        op = "int8_embedding" if isinstance(site.original, nn.Embedding) else self.op
        kept, how = self.kept(options), how_of(options)
        kind = self.kind(kept)
        found = [(group, *kernel_for(op, site, device, group, kind)) for group in groups]
        group, kernel, note, spec = next((one for one in found if one[1] in (NATIVE, HIP)), found[0])
        scales = n * (k // group) * self.scale_bytes(kept, kernel) + n * self.row_bytes
        resident = n * k * bits // 8 + scales + bias_bytes(site)
        return Choice(
            kernel, site.token_bytes, token_bytes(site, resident), resident, {"group_size": group} | kept | how, note,
            libraries=libraries(kernel, ON_GPU.get(self.op, self.op), site, device, group, kind),
            slower=slower(kernel, device), spec=spec,
        )  # fmt: skip

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        stats = stats or SiteStatistics()
        if (weight := stats.rounded) is None:
            weight = self.quantized(stats.weight(weight_of(site.original)), choice.detail)
        return self._module(site.original, weight, choice, stats)

    def weight(self, choice: Choice, parts: Mapping[str, Tensor | None]) -> RowMajor:
        return Int4Rows.of(parts, codes=self.codes) if BITS[self.op] == 4 else Int8Rows.of(parts)

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        zero = {8: 0, 4: None if self.codes else int4.ZERO_CODE}.get(BITS[self.op])
        check_weight(saved, site.n, site.k, (torch.int8,), self.dtypes, zero)
        if isinstance(self.wanted, int) and saved.k != self.wanted * saved.scale.shape[1]:
            raise KernelError(f"scale is {list(saved.scale.shape)}, and one for each {self.wanted} values belongs here")
        given = saved.tensors().get("input_scale")
        if given is not None and self.codes != NVFP4:
            raise KernelError("input_scale does not belong to this kind of weight: write the checkpoint again")
        check_input_scale(given)
        due, kind = self.kind(choice.detail), getattr(saved, "kind", "none")
        if kind != due:
            raise KernelError(f"its offset is {kind}, and {due} belongs here: write the checkpoint again")
        return self._module(site.original, saved, choice)

    def _module(
        self, original: nn.Module, weight: RowMajor, choice: Choice, stats: SiteStatistics | None = None
    ) -> nn.Module:
        mixin = self.table if self.table is not None and isinstance(original, nn.Embedding) else self.module
        made = quantized(mixin, original, weight, choice.kernel == NATIVE, stats)
        if self.codes:
            made.codes = self.codes
        module: nn.Module = made
        return module


class Int8WeightOnly(WeightOnly):
    """Symmetric int8, one float32 scale per output channel (group_size null) or per group of group_size along K.

    half_scales: float16 scales, where they hold the weight's. GPU kernels take a group size of null only.
    """

    name = "int8_weight_only"
    smooths = True
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "group_size": (int, list, type(None)),
        "half_scales": (bool,),
        **CALIBRATED,
    }
    ties = True
    no_table = None
    module, table, op = Int8WeightOnlyLinear, Int8Embedding, "int8_linear"
    dtypes = (torch.float32, torch.float16)

    def kept(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"half_scales": True} if options.get("half_scales", False) else {}

    def scale_bytes(self, detail: Mapping[str, Any], kernel: str) -> int:
        return INT4_SCALE if detail.get("half_scales") else INT8_SCALE

    def quantized(self, weight: Tensor, detail: Mapping[str, Any]) -> RowMajor:
        return int8.quantize(weight, group_size=detail["group_size"], half_scales=detail.get("half_scales", False))

    def grid(self, detail: Mapping[str, Any]) -> gptq.Grid:
        return int8.Int8Grid(detail.get("half_scales", False))

    def build_tied(self, site: Site, tied: Site, built: nn.Module) -> nn.Module:
        assert isinstance(built, QuantizedModule)
        mixin = self.table if isinstance(tied.original, nn.Embedding) else self.module
        module: nn.Module = quantized(mixin, tied.original, built, built.packable)
        return module


class Int4WeightOnly(WeightOnly):
    """4-bit weights in groups along K, with a float16 minimum, an integer zero point (zero_point), or symmetric."""

    name = "int4_weight_only"
    smooths = True
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "group_size": (int, list), "symmetric": (bool,), "zero_point": (bool,), **CALIBRATED
    }  # fmt: skip
    module: ClassVar[type[QuantizedModule]] = Int4WeightOnlyLinear
    op: ClassVar[str] = "int4_linear"
    wanted: ClassVar[Any] = [128, 64, 32]
    dtypes = (torch.float16, torch.float32)

    def kept(self, options: Mapping[str, Any]) -> dict[str, Any]:
        symmetric, zero_point = options.get("symmetric", False), options.get("zero_point", False)
        if symmetric and zero_point:
            raise KernelError("symmetric and zero_point exclude each other: a symmetric weight has no offset")
        return {"symmetric": symmetric} | ({"zero_point": True} if zero_point else {})

    def kind(self, detail: Mapping[str, Any]) -> str:
        return "none" if detail.get("symmetric") else "zero_point" if detail.get("zero_point") else "minimum"

    def scale_bytes(self, detail: Mapping[str, Any], kernel: str) -> int:
        return INT4_SCALE + OFFSET_BYTES[self.kind(detail)]

    def quantized(self, weight: Tensor, detail: Mapping[str, Any]) -> RowMajor:
        options = {name: detail[name] for name in ("group_size", "symmetric", "zero_point") if name in detail}
        return int4.quantize(weight, **options)

    def grid(self, detail: Mapping[str, Any]) -> gptq.Grid:
        return int4.Int4Grid(self.kind(detail))


class Int3WeightOnly(Int4WeightOnly):
    """3-bit weights in groups along K, with offsets as those of 4 bits."""

    name = "int3_weight_only"
    module, op = Int3WeightOnlyLinear, "int3_linear"

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        made = super().of_matrix(site, n, k, options, device)
        if isinstance(made, Reason) or device.kind == "cpu" or made.kernel == HIP:
            return made
        return replace(made, slower=NO_GPU_KERNEL)

    def quantized(self, weight: Tensor, detail: Mapping[str, Any]) -> RowMajor:
        options = {name: detail[name] for name in ("group_size", "symmetric", "zero_point") if name in detail}
        return int3.quantize(weight, **options)

    def grid(self, detail: Mapping[str, Any]) -> gptq.Grid:
        return int3.Int3Grid(self.kind(detail))

    def weight(self, choice: Choice, parts: Mapping[str, Tensor | None]) -> RowMajor:
        return Int3Rows.of(parts)


class NF4WeightOnly(WeightOnly):
    """4-bit codes of nf4 with a float32 scale for each group along K, the group's largest magnitude."""

    name = "nf4_weight_only"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"group_size": (int, list)}
    module, op = CodebookLinear, "int4_linear"
    wanted: ClassVar[Any] = [64, 32]
    dtypes, codes = (torch.float32,), "nf4"

    def quantized(self, weight: Tensor, detail: Mapping[str, Any]) -> RowMajor:
        return codebook.quantize(weight, group_size=detail["group_size"], codebook=self.codes)


class FP4WeightOnly(NF4WeightOnly):
    """The same with codes of fp4."""

    name = "fp4_weight_only"
    codes = "fp4"


class MXFP4WeightOnly(NF4WeightOnly):
    """4-bit codes of e2m1 with a power of two (E8M0) for each 32 values along K."""

    name = "mxfp4_weight_only"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    wanted, dtypes, codes = MXFP4_GROUP, (E8M0,), "e2m1"


class NVFP4WeightOnly(MXFP4WeightOnly):
    """4-bit codes of e2m1 with a scale in e4m3 for each 16 values along K, and a factor for each row."""

    name = "nvfp4_weight_only"
    module = NVFP4Linear
    wanted, dtypes, codes, row_bytes = NVFP4_GROUP, (E4M3,), NVFP4, 8

    def scale_bytes(self, detail: Mapping[str, Any], kernel: str) -> int:
        return 1


FORMATS: tuple[type[WeightOnly], ...] = (
    Int8WeightOnly, Int4WeightOnly, Int3WeightOnly,
    NF4WeightOnly, FP4WeightOnly, MXFP4WeightOnly, NVFP4WeightOnly,
)  # fmt: skip
