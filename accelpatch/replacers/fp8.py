"""Linear layers in 8-bit float: weights alone, or with their activations.

The form is the one that a GPU's matrix unit takes, by the table of archs: e4m3fn, or e4m3fnuz on gfx942. The bits of
one are other numbers in the other, so that a weight of another form than the device's is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import FP8, FP8_BLOCK, Fp8Rows, RowMajor, fp8_name
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear import fp8_linear, w8a8_linear
from accelpatch.kernels.spec import Spec
from accelpatch.modules.quantized_linear import Fp8BlockLinear, Fp8Linear, Fp8WeightOnlyLinear, quantized
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.quant import fp8
from accelpatch.quant.weight import check_weight
from accelpatch.replacers.proposing import LinearReplacer
from accelpatch.replacers.weight_kernels import (
    CPU_LIBRARY,
    HIP,
    INT8_SCALE,
    STORED,
    bias_bytes,
    token_bytes,
    weight_of,
)


class Fp8WeightOnly(LinearReplacer):
    """float8_e4m3fn weights (e4m3fnuz where matrix units take that), a float32 scale per output channel."""

    name = "fp8_weight_only"
    no_table = "there is no fp8 embedding; use int8_weight_only"
    module: ClassVar[type[QuantizedModule]] = Fp8WeightOnlyLinear

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        fnuz = device.fp8 == fp8_name(FP8[1])
        spec = fp8_linear.of_shape(n, k, getattr(torch, site.dtype), FP8[fnuz])
        reason = dispatch.why_not(spec.op, HIP, spec, device)
        kernel, note = dispatch.choose(spec.op, spec, device), f"{spec.op} not by the HIP kernels: {reason}"
        libraries = (CPU_LIBRARY,) if kernel == STORED else () if reason else fp8_linear.libraries(spec, device)
        return _choice(site, device, kernel, FP8[fnuz], note if reason else "", libraries, spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        return self._module(site, fp8.quantize(weight_of(site.original), fnuz=choice.detail["fnuz"]))

    def weight(self, choice: Choice, parts: Mapping[str, Tensor | None]) -> RowMajor:
        return Fp8Rows.of(parts)

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        _check_form(saved, choice)
        check_weight(saved, site.n, site.k, (fp8.dtype_of(fnuz=choice.detail["fnuz"]),), (torch.float32,))
        if bool((saved.scale < 0).any()):
            raise KernelError(f"scale has {float(saved.scale.min())}, and a scale is no negative number")
        return self._module(site, saved)

    def _module(self, site: Site, weight: Fp8Rows) -> nn.Module:
        module: nn.Module = quantized(Fp8WeightOnlyLinear, site.original, weight)
        return module


class Fp8Blocks(Fp8WeightOnly):
    """float8_e4m3fn weights with a float32 scale for each block of 128 x 128, stored as scales of rows.

    activations: whether inputs are rounded so too, with a scale for each 128 values of a token (W8A8).
    """

    name = "fp8_blocks"
    fusable = True
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"activations": (bool,)}
    module = Fp8BlockLinear

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        spec = fp8_linear.of_shape(n, k, getattr(torch, site.dtype), blocks=k > FP8_BLOCK)
        reason = dispatch.why_not(spec.op, HIP, spec, device)
        kernel = dispatch.choose(spec.op, spec, device)
        note = f"{spec.op} not by the HIP kernels: {reason}" if reason else ""
        libraries = (CPU_LIBRARY,) if kernel == STORED else () if reason else fp8_linear.libraries(spec, device)
        made = _choice(site, device, kernel, FP8[0], note, libraries, spec)
        more = INT8_SCALE * n * (-(-k // FP8_BLOCK) - 1)
        resident = made.resident_after + more
        detail = {**made.detail, "rounds": bool(options.get("activations", False))}
        return replace(made, bytes_after=token_bytes(site, resident), resident_after=resident, detail=detail)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        return self._made(site, choice, fp8.quantize_blocks(weight_of(site.original)))

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        fp8.check_blocks(saved, site.n, site.k)
        return self._made(site, choice, saved)

    def _made(self, site: Site, choice: Choice, weight: Fp8Rows) -> nn.Module:
        module: nn.Module = quantized(self.module, site.original, weight.replace(rounds=choice.detail["rounds"]))
        return module


class W8A8Fp8(Fp8WeightOnly):
    """Weights in 8-bit float with a float32 scale a row, and activations in the same form with a scale a token."""

    name = "w8a8_fp8"
    fusable = True
    module = Fp8Linear

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        if device.fp8 is None:
            return Reason(f"{device.why_not_fp8('')}; int8 activations (w8a8, recipe smoothquant) run there")
        form = FP8[device.fp8 == fp8_name(FP8[1])]
        spec = w8a8_linear.of_shape(n, k, getattr(torch, site.dtype), form=form)
        reason = dispatch.why_not(spec.op, HIP, spec, device)
        note = f"8-bit floats are {device.fp8}, as {_name(device)} takes them"
        if reason and device.kind != "cpu":
            note += f"; few rows not by the HIP kernels: {reason}"
        libraries = () if reason else w8a8_linear.libraries(spec, device)
        return _choice(site, device, dispatch.choose(spec.op, spec, device), form, note, libraries, spec)

    def _module(self, site: Site, weight: Fp8Rows) -> nn.Module:
        module: nn.Module = quantized(Fp8Linear, site.original, W8A8Rows(*weight.arguments()))
        return module


def _choice(
    site: Site, device: Device, kernel: str, form: torch.dtype, note: str, libraries: tuple[str, ...], spec: Spec
) -> Choice:
    assert site.n is not None
    assert site.k is not None
    resident = site.n * (site.k + INT8_SCALE) + bias_bytes(site)
    detail = {"fnuz": form == FP8[1], "arch": _name(device)}
    after = token_bytes(site, resident)
    return Choice(kernel, site.token_bytes, after, resident, detail, note, libraries=libraries, spec=spec)


def _name(device: Device) -> str:
    return "a CPU" if device.kind == "cpu" else device.arch


def _check_form(saved: Fp8Rows, choice: Choice) -> None:
    """Raise KernelError for a weight from a file in another form than the device's."""
    due = fp8.dtype_of(fnuz=choice.detail["fnuz"])
    if saved.w.dtype in FP8 and saved.w.dtype != due:
        here = choice.detail["arch"]
        raise KernelError(
            f"q is {fp8_name(saved.w.dtype)}, and {here} takes {fp8_name(due)}, in which the same bits are other "
            f"numbers: quantise the float weights for {here}"
        )
