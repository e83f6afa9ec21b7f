"""int8 weights with int8 activations: SmoothQuant's linear layers, and the same without smoothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.errors import KernelError, PlanError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import Int8Rows, RowMajor
from accelpatch.kernels.layouts.w8a8_pack import LONGEST
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear import w8a8_linear, w8a8_packed
from accelpatch.kernels.spec import Spec
from accelpatch.modules.quantized_linear import W8A8Linear, quantized
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.quant import int8
from accelpatch.quant.smoothing import LEVELS, SiteStatistics
from accelpatch.quant.weight import check_input_scale, check_weight
from accelpatch.replacers.proposing import LinearReplacer
from accelpatch.replacers.weight_kernels import (
    CPU_LIBRARY,
    HIP,
    INT8_SCALE,
    NATIVE,
    bias_bytes,
    slower,
    token_bytes,
    weight_of,
)

ACTIVATIONS = ("dynamic", "static", "auto")
WEIGHTS = ("channel", "tensor")
MOST_STATIC_ERROR = 0.03  # relative RMSE of a static scale's rounding, above which `auto` takes a scale a token


class W8A8(LinearReplacer):
    """int8 weight, one scale a row (or one in all), and int8 activations: one scale a token (dynamic), or one (static).

    auto: static where calibration finds that its rounding adds little, else dynamic.
    """

    name = "w8a8"
    fusable = True
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"activations": (str,), "weights": (str,)}
    smooths = True
    no_table = "an embedding has no activations to quantise; use int8_weight_only"

    def check_options(self, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        for key, known in (("activations", ACTIVATIONS), ("weights", WEIGHTS)):
            if options.get(key, known[0]) not in known:
                raise PlanError(f"{self.name}: option {key} is {options[key]!r}, and it is one of {', '.join(known)}")

    def observer(self, choice: Choice) -> str | None:
        return None if choice.detail["activations"] == "dynamic" else "channels"

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        if k > LONGEST:
            return Reason(f"K = {k}: sums of more than {LONGEST} products overflow an int32")
        kernel, libraries, spec = planned(n, k, getattr(torch, site.dtype), device)
        resident = n * (k + INT8_SCALE) + bias_bytes(site)
        detail = {"activations": options.get("activations", "dynamic"), "weights": options.get("weights", "channel")}
        return Choice(
            kernel, site.token_bytes, token_bytes(site, resident), resident, detail, libraries=libraries,
            slower=slower(kernel, device), spec=spec,
        )  # fmt: skip

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        stats = stats or SiteStatistics()
        weight = stats.weight(weight_of(site.original))
        made = int8.quantize(weight) if choice.detail["weights"] == "channel" else _by_tensor(weight)
        rows = W8A8Rows(made.w, made.scale, _input_scale(choice, stats, weight.device))
        return self._module(site, rows, stats, choice)

    def weight(self, choice: Choice, parts: Mapping[str, Tensor | None]) -> RowMajor:
        return W8A8Rows.of(parts)

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        check_weight(saved, site.n, site.k, (torch.int8,), (torch.float32,))
        one = getattr(saved, "input_scale", None)
        if saved.scale.shape[1] != 1:
            raise KernelError("a w8a8 weight has one scale a row and no offset")
        check_input_scale(one)
        return self._module(site, W8A8Rows(saved.w, saved.scale, one), SiteStatistics(), choice)

    def _module(self, site: Site, weight: W8A8Rows, stats: SiteStatistics, choice: Choice) -> nn.Module:
        made: nn.Module = quantized(W8A8Linear, site.original, weight, choice.kernel == NATIVE, stats)
        return made

    def finalize(self, site: Site, choice: Choice, built: nn.Module) -> Choice:
        assert isinstance(built, W8A8Linear)
        kind = "dynamic" if built.canonical().input_scale is None else "static"
        return replace(choice, kernel=f"{choice.kernel}, {kind}", detail={**choice.detail, "activations": kind})


def planned(n: int, k: int, dtype: torch.dtype, device: Device) -> tuple[str, tuple[str, ...], Spec]:
    """(the kernel of one token, the device libraries that it needs). Raises KernelError where none can run."""
    packed = w8a8_packed.of_shape(n, k, dtype)
    if dispatch.why_not(packed.op, NATIVE, packed, device) is None:
        return NATIVE, (CPU_LIBRARY,), packed
    spec = w8a8_linear.of_shape(n, k, dtype)
    chosen = dispatch.choose(w8a8_linear.OP, spec, device)
    return chosen, w8a8_linear.libraries(spec, device) if chosen == HIP else (), spec


def _by_tensor(weight: Any) -> Int8Rows:
    """One scale for the whole weight, which each row has."""
    n, k = weight.shape
    flat = int8.quantize(weight.reshape(1, n * k))
    return Int8Rows(flat.w.view(n, k), flat.scale.expand(n, 1).contiguous())


def _input_scale(choice: Choice, stats: SiteStatistics, device: torch.device) -> Any:
    wanted, most = choice.detail["activations"], stats.absmax
    if wanted == "dynamic" or (wanted == "auto" and stats.static_error > MOST_STATIC_ERROR):
        return None
    if most is None:
        raise PlanError("a static scale needs calibration statistics: accelpatch.calibrate(model, data)")
    scale = float(most.max()) / LEVELS
    if scale == 0:
        return None  # nothing but zeros came in
    return torch.tensor([scale], dtype=torch.float32, device=device)
