"""Concatenates the weights of neighbouring linear layers; the layers' own tensors become views of the result.

Names, state dicts and unpatch still work: each layer keeps a tensor of the same shape and values, at another address.
Weights that are contiguous in memory already are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.layouts.layout import concatenated
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.ops.linear.fused_linear import SILU, FusedLinear
from accelpatch.modules.compact_linear import CompactLinear
from accelpatch.modules.gemv_linear import rows_of_


def concatenated_linear(modules: Sequence[Any], dtype: torch.dtype, zeros: bool = False) -> FusedLinear:
    """Linear layers of one input as one, their rows concatenated. Raises CannotFuse where that is impossible.

    zeros: where only some have a bias, that of the others is 0 (Whisper's k_proj has none).
    """
    weights = _alike(modules, dtype)
    if len(modules) == 1:
        return FusedLinear(weights[0], modules[0].bias, prefer=_kernel(modules))
    if len({one.format for one in weights}) > 1:
        raise CannotFuse("q, k and v, or gate and up, have weights in different formats")
    bias = _concatenated_bias([module.bias for module in modules], [one.n for one in weights] if zeros else ())
    if weights[0].tiled:  # interleaved rows are separated first, and all parts get tensors of one shape
        weights = weights[0].alike([one.alone() for one in weights])
        for module, one in zip(modules, weights, strict=True):
            module.layout = one
    if reason := weights[0].why_not_concat(weights):
        raise CannotFuse(reason)
    return FusedLinear(type(weights[0]).concat(weights), bias, prefer=_kernel(modules))


def gated_linear(modules: Sequence[Any], dtype: torch.dtype, activation: str) -> FusedLinear:
    """As `concatenated_linear` for gate and up, or one layer of both; for silu the rows of tiles are interleaved.

    Two layers with interleaved tiles share the same tensors, each with its own part.
    """
    weights = _alike(modules, dtype)
    each = TILE_ROWS * (3 - len(weights))
    pairs = len({one.format for one in weights}) == 1 and all(one.tiled and one.n % each == 0 for one in weights)
    if activation not in SILU or not pairs:
        return concatenated_linear(modules, dtype)
    bias, first = _concatenated_bias([module.bias for module in modules]), weights[0]
    if len(modules) == 1:
        if first.part != "both":
            modules[0].layout = first.pair()
        return FusedLinear(modules[0].layout, bias)
    up = weights[1]
    if (first.part, up.part) != ("gate", "up") or first.w is not up.w:
        both = first.pair(up)
        for module, one, part in zip(modules, weights, ("gate", "up"), strict=True):
            module.layout = both.replace(n=one.n, part=part)
    return FusedLinear(modules[0].layout.replace(n=first.n + up.n, part="both"), bias)


def _alike(modules: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The weights of neighbours, in one order of columns; if one has no compact tiles, all are unpacked. Raises
    CannotFuse."""
    compact = [module for module in modules if isinstance(module, CompactLinear)]
    if any(not module.is_packed for module in compact):
        for module in compact:
            module.unpack()
    weights = [fused_linear(module, dtype).weight for module in modules]
    orders = [one.order for one in weights]
    if any(one is not orders[0] and not (one is not None and orders[0] is not None and torch.equal(one, orders[0]))
           for one in orders):  # fmt: skip
        raise CannotFuse("q, k and v, or gate and up, have their columns in different orders")
    return weights


def fused_linear(module: Any, dtype: torch.dtype) -> FusedLinear:
    """A linear layer's weight and bias. Raises CannotFuse for a layout that `FusedLinear` does not read."""
    if type(module).forward is nn.Linear.forward and module.weight.device.type == "cpu":
        weight: Any = Plain(module.weight)
    elif type(module).__name__ == "Conv1D" and module.weight.device.type == "cpu":
        weight = Plain(rows_of_(module))
    else:
        weight = getattr(module, "layout", None)
    if weight is None:
        raise CannotFuse(f"a linear layer is {type(module).__name__}")
    bias = module.bias
    if bias is not None and bias.dtype != dtype:
        raise CannotFuse(f"a bias is {bias.dtype}")
    if reason := weight.why_not_fused(dtype):
        raise CannotFuse(reason)
    return FusedLinear(weight, bias, prefer=_kernel([module]))


def _kernel(modules: Sequence[Any]) -> str:
    """The user's implementation by which linear layers of one input run, or "". Raises CannotFuse for several."""
    names = {getattr(module, "kernel", "") for module in modules}  # of a GemvLinear
    if len(names) > 1:
        raise CannotFuse(
            f"q, k and v, or gate and up, run by several kernels ({', '.join(sorted(filter(None, names)))})"
        )
    return str(names.pop())


def _concatenated_bias(biases: Sequence[Tensor | None], rows: Sequence[int] = ()) -> Tensor | None:
    """Concatenate biases. rows: the length of each, where a missing one counts as zeros; (): a missing one is an
    error."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    if len(present) < len(biases) == len(rows):
        filled = [present[0].new_zeros(n) if bias is None else bias for n, bias in zip(rows, biases, strict=True)]
        return concatenated(filled)
    if len(present) < len(biases):
        raise CannotFuse("of q, k and v, or gate and up, only some have a bias")
    return concatenated(present)


@dataclass(frozen=True)
class SeparateLinears:
    """Linear layers of one input whose weights are not concatenated: each is called, and the columns are."""

    parts: tuple[FusedLinear, ...]

    def large_m(self, x: Any) -> Tensor:
        """As of FusedLinear."""
        return torch.cat([part.large_m(x) for part in self.parts], dim=-1)


@dataclass(frozen=True)
class OfTorch:
    """A linear layer by torch's own function."""

    weight: Tensor
    bias: Tensor | None

    def large_m(self, x: Tensor) -> Tensor:
        """As of FusedLinear."""
        return functional.linear(x, self.weight, self.bias)


def on_cpu(modules: Sequence[Any], dtype: torch.dtype, zeros: bool = False) -> FusedLinear | OfTorch | SeparateLinears:
    """As `concatenated_linear` on a CPU, whose packs would be copied: those stay apart. Raises CannotFuse."""
    if all(getattr(module, "layout", None) is None for module in modules):
        made = concatenated_linear(modules, dtype, zeros)
        return OfTorch(made.weight.w, made.bias) if isinstance(made.weight, Plain) else made
    parts = [_apart(module, dtype) for module in modules]
    return parts[0] if len(parts) == 1 else SeparateLinears(tuple(parts))


def _apart(module: Any, dtype: torch.dtype) -> FusedLinear:
    layout = getattr(module, "layout", None)
    return fused_linear(module, dtype) if layout is None else FusedLinear(layout, module.bias)
