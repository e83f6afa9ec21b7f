"""Concatenates the weights of neighbouring linear layers; the layers' own tensors become views of the result.

Names, state dicts and unpatch still work: each layer keeps a tensor of the same shape and values at another address.
Weights that are contiguous with each other already are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.layouts import compact_tiles, int4_tiles
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.ops.fused_linear import SILU, FusedLinear
from accelpatch.modules.compact_linear import CompactLinear
from accelpatch.modules.gemv_linear import GemvLinear
from accelpatch.modules.weight_only import Int4WeightOnlyLinear, Int8WeightOnlyLinear

LAYOUTS: dict[type, Any] = {Tiles: int4_tiles, CompactTiles: compact_tiles}


def concatenated_linear(modules: Sequence[Any], dtype: torch.dtype) -> FusedLinear:
    """Linear layers of one input as one, their rows concatenated. Raises CannotFuse where they make no one."""
    linears = _alike(modules, dtype)
    if len(linears) == 1:
        return linears[0]
    kinds = {_kind(one) for one in linears}
    if len(kinds) > 1:
        raise CannotFuse("q, k and v, or gate and up, have weights in different formats")
    bias = _beside([module.bias for module in modules])
    first = linears[0].w
    if not isinstance(first, Tensor):
        _apart(modules)
        tiles = [module.tiles for module in modules]
        if any(one.n % TILE_ROWS for one in tiles):
            raise CannotFuse(f"the number of rows in tiles is not a multiple of {TILE_ROWS}")
        tables = [_concatenated([one[place] for one in tiles]) for place in range(3)]
        both: Any = tiles[0]._make([*tables, sum(one.n for one in tiles), *tiles[0][4:]])
        return FusedLinear(both, bias=bias)
    joined = _concatenated([one.w for one in linears if isinstance(one.w, Tensor)])
    assert joined is not None
    return FusedLinear(joined, _concatenated([one.scale for one in linears]), bias)


def gated_linear(modules: Sequence[Any], dtype: torch.dtype, activation: str) -> FusedLinear:
    """As `concatenated_linear` for gate and up, or one layer of both; for silu the rows of tiles are interleaved.

    Two layers with interleaved tiles share the same tensors, each with its own part.
    """
    linears = _alike(modules, dtype)
    tiles = [one.w for one in linears if not isinstance(one.w, Tensor)]
    each = TILE_ROWS * (3 - len(tiles))
    pairs = len({_kind(one) for one in linears}) == 1 and all(one.n % each == 0 for one in tiles)
    if activation not in SILU or not tiles or len(tiles) < len(linears) or not pairs:
        return concatenated_linear(modules, dtype)
    bias, layout = _beside([module.bias for module in modules]), LAYOUTS[type(tiles[0])]
    if len(modules) == 1:
        if tiles[0].part != "both":
            modules[0].tiles = layout.pair(tiles[0])
        return FusedLinear(modules[0].tiles, bias=bias)
    gate, up = tiles
    if (gate.part, up.part) != ("gate", "up") or gate.w is not up.w:
        both = layout.pair(gate, up)
        modules[0].tiles, modules[1].tiles = (
            both._replace(n=one.n, part=part) for one, part in zip(tiles, ("gate", "up"), strict=True)
        )
    return FusedLinear(modules[0].tiles._replace(n=gate.n + up.n, part="both"), bias=bias)


def _apart(modules: Sequence[Any]) -> None:
    """Give layers with interleaved tiles their own tiles again, all with the same number of outliers per row."""
    tiles = [LAYOUTS[type(module.tiles)].alone(module.tiles) for module in modules]
    if all(isinstance(one, CompactTiles) for one in tiles):
        tiles = compact_tiles.alike(tiles)
    for module, one in zip(modules, tiles, strict=True):
        module.tiles = one


def _alike(modules: Sequence[Any], dtype: torch.dtype) -> list[FusedLinear]:
    """The linear layers of neighbours; if one's weight has no compact tiles, all are unpacked."""
    compact = [module for module in modules if isinstance(module, CompactLinear)]
    if any(module.tiles is None for module in compact):
        for module in compact:
            module.unpack()
    return [fused_linear(module, dtype) for module in modules]


def fused_linear(module: Any, dtype: torch.dtype) -> FusedLinear:
    """A linear layer's weight and bias. Raises CannotFuse for a format that `FusedLinear` does not read."""
    if not issubclass(type(module), nn.Linear):
        raise CannotFuse(f"a linear layer is {type(module).__name__}")
    bias = module.bias
    if bias is not None and bias.dtype != dtype:
        raise CannotFuse(f"a bias is {bias.dtype}")
    if isinstance(module, CompactLinear) and module.tiles is not None:
        if dtype != torch.bfloat16:
            raise CannotFuse(f"its activations are {dtype}, and 12-bit weights need bfloat16")
        return FusedLinear(module.tiles, bias=bias)
    if isinstance(module, (GemvLinear, CompactLinear)) or _plain_on_a_cpu(module):
        if module.weight.dtype != dtype or not module.weight.is_contiguous():
            raise CannotFuse(f"a weight is {module.weight.dtype}, or is not contiguous")
        return FusedLinear(module.weight, bias=bias)
    if isinstance(module, Int8WeightOnlyLinear):
        held = module.held
        if held.q is None or held.scale is None or held.scale.shape[1] != 1 or held.scale.dtype != torch.float32:
            raise CannotFuse("an int8 weight does not have one float32 scale per row")
        return FusedLinear(held.q, held.scale, bias)
    if isinstance(module, Int4WeightOnlyLinear) and module.tiles is not None:
        return FusedLinear(module.tiles, bias=bias)
    raise CannotFuse(f"a linear layer is {type(module).__name__}")


def _plain_on_a_cpu(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and module.weight.device.type == "cpu"


def _kind(one: FusedLinear) -> tuple[Any, ...]:
    if isinstance(one.w, Tiles):
        return one.w.k, one.w.group, one.w.kind, one.w.scale.dtype
    if isinstance(one.w, CompactTiles):
        return one.w.k, CompactTiles
    return one.k, one.w.dtype, one.scale is None


def _beside(biases: Sequence[Tensor | None]) -> Tensor | None:
    held = [bias for bias in biases if bias is not None]
    if not held:
        return None
    if len(held) < len(biases):
        raise CannotFuse("of q, k and v, or gate and up, only some have a bias")
    return _concatenated(held)


def _concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate tensors along the first dimension; they become views of the result."""
    held = [part for part in parts if part is not None]
    if not held:
        return None
    joined = _in_one_run(held)
    if joined is None:
        joined = torch.cat([part.detach() for part in held])
        at = 0
        for part in held:
            part.data = joined[at : at + part.shape[0]]
            at += part.shape[0]
    return joined


def _in_one_run(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over `parts` where they are contiguous with each other in memory; else None."""
    first = parts[0].detach()
    at = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != at or not part.is_contiguous():
            return None
        at += part.numel() * part.element_size()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())
