"""Linear layers whose bfloat16 weights are stored losslessly in 12 bits per value (GPU only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts import compact_tiles
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.ops.linear import compact_linear
from accelpatch.modules.compact_linear import CompactLinear
from accelpatch.modules.replacement import adopt
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.replacers.gemv import NATIVE, Gemv
from accelpatch.replacers.weight_kernels import bias_bytes

BESIDE = 4 + 4 * compact_tiles.FOUR  # bytes per row: its scale, and outliers of a typical row


class Compact(Gemv):
    """As `gemv`, with the weight in lossless 12-bit bf16; plain `gemv`, with the reason noted, where that fails."""

    name = "compact"
    fusable = True

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        plain = super().propose(site, options, device)
        if isinstance(plain, Reason):
            return plain
        assert site.n is not None
        assert site.k is not None
        if type(site.original).__name__ == "Conv1D":
            return _kept(plain, "the weight of a Conv1D")
        if site.tied:
            return _kept(plain, "a weight tied to an embedding's")
        spec = compact_linear.of_shape(site.n, site.k, getattr(torch, site.dtype))
        if reason := dispatch.why_not(spec.op, NATIVE, spec, device):
            return _kept(plain, reason)
        tiles, steps = -(-site.n // TILE_ROWS), -(-site.k // compact_tiles.STEP)
        size = tiles * (steps * compact_tiles.STEP_BYTES + TILE_ROWS * BESIDE) + bias_bytes(site)
        libraries = compact_linear.libraries(spec.dtype)
        return replace(
            plain, bytes_after=size, resident_after=size, detail={"compact": True}, libraries=libraries, spec=spec
        )  # fmt: skip

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        if not choice.detail:
            return super().build(site, choice, stats)
        module = adopt(CompactLinear, site.original)
        module.hold()
        return module

    def finalize(self, site: Site, choice: Choice, built: nn.Module) -> Choice:
        if not isinstance(built, CompactLinear):
            return choice
        size = built.weight_bytes + bias_bytes(site)
        choice = replace(choice, bytes_after=size, resident_after=size)
        return _kept(choice, built.refusal) if built.refusal else choice


def _kept(plain: Choice, reason: str) -> Choice:
    return replace(plain, note=f"a weight stays in 16 bits: {reason}")
