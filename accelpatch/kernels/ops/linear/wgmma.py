"""The implementation `triton_wgmma` of int8_linear, fp8_linear and tiled_int4_linear: GEMMs on Hopper's matrix unit,
whose left operand is made of the weight's codes in registers (kernels/triton/hopper_gemm.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.layouts.tiling import TILE_VALUES
from accelpatch.kernels.ops.linear import common
from accelpatch.kernels.spec import Spec
from accelpatch.kernels.triton import launch


def _why_not(spec: Spec, device: Device) -> str | None:
    if reason := common.too_large(spec) or launch.why_not(device, spec.dtype) or launch.no_wgmma(device):
        return reason
    if spec.dtype not in HALVES:
        return f"it multiplies floats of 16 bits, not {spec.dtype}"
    return None if spec.sizes["M"] else "x has no rows"


def int8_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_int8` cannot run a spec: K is a multiple of 128, with a scale a row or for 128 times a power of two."""
    k, group = spec.sizes["K"], spec.group_size or spec.sizes["K"]
    if reason := _why_not(spec, device):
        return reason
    if k % TILE_VALUES:
        return f"K = {k} is no multiple of {TILE_VALUES}"
    steps, rest = divmod(group, TILE_VALUES)
    fits = group == k or (not rest and steps & (steps - 1) == 0)
    return None if fits else f"groups of {group} are not {TILE_VALUES} times a power of two"


def by_int8(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As int8_linear."""
    from accelpatch.kernels.triton import hopper_gemm

    return hopper_gemm.int8(x, q, scale, bias)


def fp8_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_fp8` cannot run a spec: it takes e4m3fn, and K that is a multiple of 128."""
    if reason := _why_not(spec, device):
        return reason
    if spec.options.get("form") == fp8_name(FP8[1]):
        return "it reads e4m3fn alone"
    k = spec.sizes["K"]
    return f"K = {k} is no multiple of {TILE_VALUES}" if k % TILE_VALUES else None


def by_fp8(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As fp8_linear."""
    from accelpatch.kernels.triton import hopper_gemm

    return hopper_gemm.e4m3(x, q, scale, bias)


def int4_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_int4` cannot run a spec: it takes groups of 128 and more."""
    group, k = spec.group_size, spec.sizes["K"]
    if reason := _why_not(spec, device):
        return reason
    if spec.offset in CODEBOOKS:
        return f"it has no values of {spec.offset}"
    small = group is None or (group < TILE_VALUES and group != k)
    return f"groups of {group} are smaller than {TILE_VALUES}" if small else None


def by_int4(x: Tensor, *args: Any) -> Tensor:
    """As tiled_int4_linear; of one half of interleaved tiles it computes the other too."""
    from accelpatch.kernels.triton import hopper_gemm

    *rest, bias = args
    return hopper_gemm.int4(x, Tiles(*rest), bias)
