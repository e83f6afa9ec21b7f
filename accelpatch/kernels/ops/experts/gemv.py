"""The implementation `hip` of experts (experts.py): few tokens, 4-bit codes in tiles; kernels: hip/experts/experts.h.

Each chosen expert of each token is read for itself, in two launches: gate, up and silu; then down, the weighted sum and
the residual. The order of a token's sums does not depend on the other tokens of the call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels.codebooks import CODEBOOKS, NVFP4
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.experts import binding as launched
from accelpatch.kernels.layouts import expert_tiles, int4_tiles
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.layouts.int4_tiles import ONE_GROUP
from accelpatch.kernels.layouts.tiling import TILE_ROWS, TILE_VALUES
from accelpatch.kernels.spec import Spec

ACTIVATIONS = ("silu", "swish")


def why_not(spec: Spec, device: Device) -> str | None:
    """Why the device library cannot run a spec; None where it can."""
    if reason := _without_library(spec, device) or _unfit(spec):
        return reason
    return None if spec.options["tiled"] else "its weights lie in words, not in tiles"


def why_not_tiles(spec: Spec, device: Device) -> str | None:
    """Why the weights of experts do not lie in tiles on a device: one token would not run on them."""
    one = {**spec.sizes, "M": 1, "k": 1}
    return why_not(replace(spec, sizes=one, options={**spec.options, "tiled": True}), device)


def libraries(spec: Spec) -> tuple[str, ...]:
    """The device libraries of such experts."""
    return tuple(dict.fromkeys(binding.library_name(name, spec.dtype, spec.offset) for name in _functions(spec)))


def _matrices(spec: Spec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(N, K, group size) of an expert's gate and up, and of down."""
    width, inner, groups = spec.sizes["H"], spec.sizes["I"], spec.options["groups"]
    return (2 * inner, width, groups[0]), (width, inner, groups[1])


def _functions(spec: Spec) -> list[str]:
    return [launched.function_of(ONE_GROUP if group == k else group) for _, k, group in _matrices(spec)]


def _without_library(spec: Spec, device: Device) -> str | None:
    if spec.options["bits"] != 4:
        return f"its weights have {spec.options['bits']} bits, and the kernels read 4"
    if spec.offset == NVFP4:
        return "its codes are of NVFP4, which the kernels of experts do not read"
    for (n, k, group), function in zip(_matrices(spec), _functions(spec), strict=True):
        if spec.offset in CODEBOOKS and (reason := int4_tiles.unfit(k, group, spec.scale_dtype, spec.offset)):
            return reason
        one = replace(spec, sizes={"N": n * spec.sizes["k"], "K": k * spec.sizes["k"]})
        if reason := binding.why_not(one, device, function, spec.offset):
            return reason
    return None


def _unfit(spec: Spec) -> str | None:
    chosen = spec.sizes["k"]
    if spec.options["activation"] not in ACTIVATIONS:
        return f"its activation is {spec.options['activation']}, and that of the kernels is silu"
    if spec.options["biased"]:
        return "it has biases"
    if chosen > launched.MOST_CHOSEN:
        return f"{chosen} experts a token are more than {launched.MOST_CHOSEN}"
    for n, k, group in _matrices(spec):
        if reason := expert_tiles.unfit(n, k, group, spec.scale_dtype, spec.offset):
            return reason
        if max(n // TILE_ROWS, k // TILE_VALUES) ** 2 * chosen >= 1 << 32 or spec.sizes["E"] >= 1 << 31:
            return "its sizes are beyond 32-bit indices"
    return None


def by_hip(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """The implementation `hip`."""
    return launched.experts(x, launched.ChosenExperts(ids, weights), Stack(*given[:4]), Stack(*given[4:8]), given[11])
