"""Weight-only linear layers in 8-bit float."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.kernels.ops import fp8_linear
from accelpatch.modules.weight_only import Fp8WeightOnlyLinear, quantized
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site
from accelpatch.quant import QuantizedWeight, fp8
from accelpatch.quant.weight import check_held
from accelpatch.replacers.weight_only import HIP, bias_bytes, token_bytes, unfit, weight_of

SCALE = 4  # bytes per scale: float32


class Fp8WeightOnly(Replacer):
    """float8_e4m3fn weights (e4m3fnuz where the device's matrix units take that), a float32
    scale per output channel."""

    name = "fp8_weight_only"

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        if reason := unfit(site):
            return Reason(reason)
        if isinstance(site.original, nn.Embedding):
            return Reason("there is no fp8 embedding; use int8_weight_only")
        assert site.n is not None
        assert site.k is not None
        fnuz = device.facts is not None and device.facts.fp8 == "e4m3fnuz"
        spec = fp8_linear.of_shape(site.n, site.k, getattr(torch, site.dtype), FP8[fnuz])
        reason = dispatch.why_not(spec.op, HIP, spec, device)
        kernel, note = dispatch.choose(spec.op, spec, device), f"{spec.op} not by the HIP kernels: {reason}"
        resident = site.n * (site.k + SCALE) + bias_bytes(site)
        after, libraries = token_bytes(site, resident), () if reason else fp8_linear.libraries(spec, device)
        detail = {"fnuz": fnuz}
        return Choice(kernel, site.token_bytes, after, resident, detail, note if reason else "", libraries=libraries)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        weight = fp8.quantize(weight_of(site.original), fnuz=choice.detail["fnuz"])
        return self._module(site, weight)

    def restore(self, site: Site, choice: Choice, held: QuantizedWeight) -> nn.Module:
        check_held(held, site.n, site.k, (fp8.dtype_of(fnuz=choice.detail["fnuz"]),), (torch.float32,))
        return self._module(site, held)

    def _module(self, site: Site, weight: QuantizedWeight) -> nn.Module:
        module: nn.Module = quantized(Fp8WeightOnlyLinear, site.original, weight)
        return module
