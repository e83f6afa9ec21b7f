"""Which kernels of a fused layer start on partial results, signalled by flags of the kernel before.

Attention needs q and k to score the cached keys, while v of the new token is needed last. `down` starts on the first K
tiles of its input while the last tiles of gate and up are being computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.hip.binding import K_TILE, SENTINEL, Signal
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear

ALIGNED = 8  # 16-bit columns per 16-byte read


class SentinelBuffers:
    """Output buffers for one row, filled with SENTINEL until a GEMM writes them: int16[layers, columns]."""

    def __init__(self, layers: int, columns: int, device: torch.device) -> None:
        self.words = torch.full((layers, -(-columns // ALIGNED) * ALIGNED), SENTINEL, dtype=torch.int16, device=device)

    def reset(self, rows: int) -> None:
        """Reset before a step of `rows` rows; another kernel must run between this and the first producer."""
        if rows == 1:
            self.words.fill_(SENTINEL)

    def on(self, device: torch.device) -> SentinelBuffers:
        """Those of the layers on a device: all of them lie on one."""
        return self


def with_signals(
    layers: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], SentinelBuffers]:
    """A model's fused layers (None: not fused) with producer and consumer flags, and their sentinel-filled buffers."""
    fused = [layer for layer in layers if layer is not None]
    consumed = [
        (
            0 if one.prepare or one.by_head else consumed_by_attention(one.qkv, one.attention, dtype),
            consumed_by_down(one.gate_up, one.down, one.activation),
        )
        for one in fused
    ]
    made = [
        [one.qkv.n if first else 0, one.down.k if second else 0]
        for one, (first, second) in zip(fused, consumed, strict=True)
    ]
    sentinels = SentinelBuffers(len(fused), max(map(sum, made), default=0), device)
    words = [row[: sum(widths)].split(widths) for row, widths in zip(sentinels.words, made, strict=True)]
    signalling = map(_with_signals, fused, consumed, words)
    return tuple(None if layer is None else next(signalling) for layer in layers), sentinels


def _with_signals(layer: Any, columns: tuple[int, int], words: Sequence[Tensor]) -> Any:
    """One layer with its flags. columns, words: for what attention and `down` consume early."""
    first, second = map(_signal, columns, words)
    if first:
        layer = replace(layer, qkv=replace(layer.qkv, producer=first))
    if second:
        layer = replace(
            layer, gate_up=replace(layer.gate_up, producer=second), down=replace(layer.down, consumer=second)
        )
    return layer


def _signal(columns: int, words: Tensor) -> Signal | None:
    return Signal(torch.zeros(2, dtype=torch.int32, device=words.device), columns, words) if columns else None


def consumed_by_attention(qkv: FusedLinear | AdaptedLinear, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Number of q and k columns that the device library's attention waits for by flag; 0 where it does not."""
    columns = (shape.heads + shape.kv_heads) * shape.size
    if not isinstance(qkv, FusedLinear) or not qkv.one_launch() or columns % TILE_ROWS:
        return 0
    if (
        qkv.weight.order is not None
    ):  # attention would write where the reordered rows lie, which the product still reads
        return 0
    device = probe(qkv.weight.w.device)
    return columns if device.kind == "cpu" or (_overlap(device) and not attention.why_not(shape, dtype, device)) else 0


def consumed_by_down(
    gate_up: FusedLinear | AdaptedLinear, down: FusedLinear | AdaptedLinear, activation: str | None
) -> int:
    """Number of input columns that `down` waits for by flag: all but its last K tile; 0 where it does not."""
    if not isinstance(gate_up, FusedLinear) or not isinstance(down, FusedLinear) or not gate_up.one_launch(activation):
        return 0
    if down.prefer:  # a user's kernel waits for no flag
        return 0
    if down.weight.whole_rows or down.weight.order is not None:
        return 0
    return (down.k - 1) // K_TILE * K_TILE if _overlap(probe(down.weight.w.device)) else 0


def _overlap(device: Device) -> bool:
    """Whether a kernel can start before the one before it has ended (Hopper and later). True for a CPU, for tests."""
    return device.kind == "cpu" or (device.facts is not None and device.facts.dependent_launch)


def without_signals(linear: FusedLinear | AdaptedLinear | None) -> FusedLinear | AdaptedLinear | None:
    """The same linear layer without flags, and with no words that launches on several streams would share."""
    if linear is None:  # of experts
        return None
    return replace(linear, producer=None, consumer=None) if isinstance(linear, FusedLinear) else linear.alone
