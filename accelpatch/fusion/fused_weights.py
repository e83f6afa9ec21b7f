"""Concatenates the weights of neighbouring linear layers; the layers' own tensors become views of the result.

Names, state dicts and unpatch still work: each layer keeps a tensor of the same shape and values at another address.
Weights that are contiguous with each other already are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.layouts.layout import concatenated
from accelpatch.kernels.layouts.row_major import Int8Rows, Plain
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear.fused_linear import SILU, FusedLinear
from accelpatch.modules.codebook_linear import CodebookLinear
from accelpatch.modules.compact_linear import CompactLinear
from accelpatch.modules.fp8_linear import Fp8Linear
from accelpatch.modules.gemv_linear import GemvConv1D, GemvLinear, rows_of_
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.w8a8_linear import W8A8Linear
from accelpatch.modules.weight_only import Int4WeightOnlyLinear, Int8WeightOnlyLinear


def concatenated_linear(modules: Sequence[Any], dtype: torch.dtype) -> FusedLinear:
    """Linear layers of one input as one, their rows concatenated. Raises CannotFuse where they make no one."""
    linears = _alike(modules, dtype)
    if len(linears) == 1:
        return linears[0]
    weights, order = [one.weight for one in linears], _common_order(linears)
    if len({one.format for one in weights}) > 1:
        raise CannotFuse("q, k and v, or gate and up, have weights in different formats")
    bias = _beside([module.bias for module in modules])
    if weights[0].tiled:
        weights = _apart(modules)
    if reason := weights[0].why_not_concat(weights):
        raise CannotFuse(reason)
    return FusedLinear(type(weights[0]).concat(weights), bias, order=order)


def gated_linear(modules: Sequence[Any], dtype: torch.dtype, activation: str) -> FusedLinear:
    """As `concatenated_linear` for gate and up, or one layer of both; for silu the rows of tiles are interleaved.

    Two layers with interleaved tiles share the same tensors, each with its own part.
    """
    linears = _alike(modules, dtype)
    weights = [one.weight for one in linears]
    each = TILE_ROWS * (3 - len(weights))
    pairs = len({one.format for one in weights}) == 1 and all(one.tiled and one.n % each == 0 for one in weights)
    if activation not in SILU or not pairs:
        return concatenated_linear(modules, dtype)
    bias, tiles = _beside([module.bias for module in modules]), cast(list[Any], weights)
    order = _common_order(linears)
    if len(modules) == 1:
        if tiles[0].part != "both":
            modules[0].tiles = tiles[0].pair()
        return FusedLinear(modules[0].tiles, bias, order=order)
    gate, up = tiles
    if (gate.part, up.part) != ("gate", "up") or gate.w is not up.w:
        both = gate.pair(up)
        modules[0].tiles, modules[1].tiles = (
            both._replace(n=one.n, part=part) for one, part in zip(tiles, ("gate", "up"), strict=True)
        )
    return FusedLinear(modules[0].tiles._replace(n=gate.n + up.n, part="both"), bias, order=order)


def _common_order(linears: Sequence[FusedLinear]) -> Tensor | None:
    """The order of their columns. Raises CannotFuse where it is not one."""
    orders = [one.order for one in linears]
    first = orders[0]
    same = all((one is None) == (first is None) for one in orders)
    if not same or any(first is not None and one is not None and not torch.equal(one, first) for one in orders):
        raise CannotFuse("q, k and v, or gate and up, have their columns in different orders")
    return first


def _apart(modules: Sequence[Any]) -> list[Any]:
    """Give layers with interleaved tiles tiles of their own again, all with tensors of one form."""
    tiles = type(modules[0].tiles).alike([module.tiles.alone() for module in modules])
    for module, one in zip(modules, tiles, strict=True):
        module.tiles = one
    return [module.tiles for module in modules]


def _alike(modules: Sequence[Any], dtype: torch.dtype) -> list[FusedLinear]:
    """The linear layers of neighbours; if one's weight has no compact tiles, all are unpacked."""
    compact = [module for module in modules if isinstance(module, CompactLinear)]
    if any(module.tiles is None for module in compact):
        for module in compact:
            module.unpack()
    return [fused_linear(module, dtype) for module in modules]


def fused_linear(module: Any, dtype: torch.dtype) -> FusedLinear:
    """A linear layer's weight and bias. Raises CannotFuse for a format that `FusedLinear` does not read."""
    conv = _is_plain_conv(module)
    if not conv and not issubclass(type(module), (nn.Linear, QuantizedModule)):
        raise CannotFuse(f"a linear layer is {type(module).__name__}")
    bias = module.bias
    if bias is not None and bias.dtype != dtype:
        raise CannotFuse(f"a bias is {bias.dtype}")
    if isinstance(module, CompactLinear) and module.tiles is not None:
        if dtype != torch.bfloat16:
            raise CannotFuse(f"its activations are {dtype}, and 12-bit weights need bfloat16")
        return FusedLinear(module.tiles, bias)
    if conv and module.weight.dtype == dtype:
        return FusedLinear(Plain(rows_of_(module)), bias)
    if isinstance(module, (GemvLinear, CompactLinear)) or _plain_on_a_cpu(module):
        if module.weight.dtype != dtype or not module.weight.is_contiguous():
            raise CannotFuse(f"a weight is {module.weight.dtype}, or is not contiguous")
        return FusedLinear(Plain(module.weight), bias)
    if isinstance(module, Int8WeightOnlyLinear):
        held = module.held
        if held.q is None or held.scale is None or held.scale.shape[1] != 1 or held.scale.dtype != torch.float32:
            raise CannotFuse("an int8 weight does not have one float32 scale per row")
        return FusedLinear(Int8Rows(held.q, held.scale), bias, order=held.order)
    if isinstance(module, (W8A8Linear, Fp8Linear)):
        assert module.held.q is not None
        assert module.held.scale is not None
        static = module.input_scale if isinstance(module, W8A8Linear) else None
        return FusedLinear(W8A8Rows(module.held.q, module.held.scale, static), bias)
    if isinstance(module, Int4WeightOnlyLinear) and module.tiles is not None:
        return FusedLinear(module.tiles, bias, order=module.order)
    if isinstance(module, CodebookLinear) and module.tiles is not None:
        return FusedLinear(module.tiles, bias)
    raise CannotFuse(f"a linear layer is {type(module).__name__}")


def _plain_on_a_cpu(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and module.weight.device.type == "cpu"


def _is_plain_conv(module: nn.Module) -> bool:
    """Whether a module is a Conv1D with a float weight: a replaced one, or on a CPU any."""
    own = type(module).__name__ == "Conv1D" and next(module.parameters()).device.type == "cpu"
    return own or isinstance(module, GemvConv1D)


def _beside(biases: Sequence[Tensor | None]) -> Tensor | None:
    held = [bias for bias in biases if bias is not None]
    if not held:
        return None
    if len(held) < len(biases):
        raise CannotFuse("of q, k and v, or gate and up, only some have a bias")
    return concatenated(held)
