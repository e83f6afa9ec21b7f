"""Binding of the device library's decode attention: its limits, and a launch from tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import KIB, Device, probe
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.gpu_libraries import WIDTHS
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import Signal
from accelpatch.kernels.layouts.kv_states import FLOAT, LARGEST, States, format_of, part_of, tensors_of
from accelpatch.kernels.triton.launch import on_device

FUNCTION = "decode_attention"
QUERIES, KV_SPLIT = 8, 256  # of a block; slots whose results are added up by themselves
PIECE, PARTIAL_HEAD = 16, 4  # columns of a piece of a split's partial state, and the numbers before them
ROWS = 256  # most rows of one launch
LOG2_E = 1.4426950408889634

_POINTERS = (
    "qkv", "positions", "slot", "mask", "keys", "values", "inv_freq", "q_norm", "k_norm", "y", "partials", "finished",
    "consumer", "following", "key_scales", "value_scales", "sinks",
)  # fmt: skip
_SIZES = (
    "following_bytes", "consumer_columns", "rows", "tokens", "capacity", "heads", "kv_heads", "size", "rotary_dim",
    "window", "splits",
)  # fmt: skip
_FLOATS = ("scaling", "softcap", "rope_scaling", "epsilon")


class AttentionArgs(ctypes.Structure):
    """Mirror of ``AttentionArgs`` in attention.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_float) for name in _FLOATS]
        + [(name, ctypes.c_int32) for name in ("plus_one", "dependent")]
    )


def widest(device: Device) -> int:
    """Columns of the widest head: eight tokens of many rows must fit a block's shared memory; on AMD, its registers."""
    if device.facts is None or device.vendor == "amd":
        return 128
    return next((columns for columns, room in ((256, 227), (128, 163)) if device.facts.block_shared >= room * KIB), 64)


def why_not(shape: AttentionShape, dtype: torch.dtype, device: Device, cache: str = FLOAT) -> str | None:
    """Why the library does not support such a layer; None where it does. cache: the format of keys and values."""
    if cache != FLOAT and (reason := _codes_why_not(shape, dtype, cache)):
        return reason
    if dtype not in binding.DTYPES or shape.inv_freq.dtype != torch.float32:
        return f"it takes bfloat16 or float16, and frequencies in float32, not {dtype} and {shape.inv_freq.dtype}"
    most = widest(device)
    if shape.size % 8 or shape.size > most or shape.heads % shape.kv_heads:
        takes = f"heads of 8 to {most} columns, a multiple of 8, on {device.arch}"
        return f"it takes {takes}, not {shape.heads} on {shape.kv_heads} of {shape.size}"
    return libraries.why_not(library(shape.size, dtype, cache), device)


def _codes_why_not(shape: AttentionShape, dtype: torch.dtype, cache: str) -> str | None:
    """Why no kernel of the library reads such a cache in a model of this dtype; None where one does."""
    if cache not in LARGEST or dtype != torch.bfloat16:
        return f"it takes a cache in int8 or fp8 beside bfloat16, not one in {cache} beside {dtype}"
    return None if shape.size % 16 == 0 else f"over a cache in {cache} it takes heads of a multiple of 16 columns"


def function(cache: str) -> str:
    """The function of the C interface, less its prefix, for a cache in a format."""
    return FUNCTION if cache == FLOAT else f"{FUNCTION}_{cache}"


def library(size: int, dtype: torch.dtype, cache: str = FLOAT) -> str:
    """The device library for heads of a size."""
    return binding.library_name(function(cache), dtype, str(_columns(size)))


def decode_attention_(
    qkv: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States, shape: AttentionShape,
    following: Tensor | None = None, consumer: Signal | None = None,
) -> Tensor:  # fmt: skip
    """As the operation; qkv, positions, slot, mask and the cache must be contiguous. Raises KernelError if refused."""
    rows, tokens = positions.shape
    y = qkv.new_empty(*qkv.shape[:-1], shape.heads * shape.size)
    if following is not None and following.data_ptr() % 16:
        following = None  # nothing there is brought by 16 bytes
    for begin in range(0, rows, ROWS):
        some, own = slice(begin, begin + ROWS), slice(begin * tokens, (begin + ROWS) * tokens)
        flat = qkv.view(rows * tokens, -1)[own], y.view(rows * tokens, -1)[own]
        _launch(
            *flat,
            positions[some],
            slot[some],
            mask[some],
            part_of(keys, some),
            part_of(values, some),
            shape,
            following,
            None if rows > ROWS else consumer,
        )
    return y


def _launch(
    qkv: Tensor, y: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States,
    shape: AttentionShape, following: Tensor | None, consumer: Signal | None,
) -> None:  # fmt: skip
    args = arguments(qkv, y, positions, slot, mask, keys, values, shape, following, consumer)
    with on_device(qkv):
        entry = _entry(shape.size, qkv.dtype, probe(qkv.device), format_of(keys))
        status = entry(ctypes.byref(args), binding.DTYPES.index(qkv.dtype), binding.stream_of(qkv))
        binding.check(status, f"accelpatch_{function(format_of(keys))}")


def arguments(
    qkv: Tensor, y: Tensor, positions: Tensor, slot: Tensor, mask: Tensor, keys: States, values: States,
    shape: AttentionShape, following: Tensor | None, consumer: Signal | None = None,
) -> AttentionArgs:  # fmt: skip
    """The launch arguments."""
    (rows, tokens), capacity = positions.shape, keys.shape[2]
    queries = tokens * (shape.heads // shape.kv_heads)
    heads, splits = rows * shape.kv_heads * -(-queries // QUERIES), (capacity - 1) // KV_SPLIT + 2
    counters = -(-heads // 4) * 4
    partials = heads * min(queries, QUERIES) * splits * _columns(shape.size) // PIECE * (PARTIAL_HEAD + PIECE)
    zeros = shape.memory.first(counters + partials, qkv.device)
    (codes, *key_scales), (value_codes, *value_scales) = tensors_of(keys), tensors_of(values)
    tensors = {
        "qkv": qkv, "positions": positions, "slot": slot, "mask": mask, "keys": codes, "values": value_codes, "y": y,
        "key_scales": next(iter(key_scales), None), "value_scales": next(iter(value_scales), None),
        "partials": zeros[counters:], "finished": zeros,
        "inv_freq": shape.inv_freq, "q_norm": shape.q_norm, "k_norm": shape.k_norm, "sinks": shape.sinks,
        "following": following,
    }  # fmt: skip
    cap = shape.softcap > 0
    return AttentionArgs(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        following_bytes=0 if following is None else following.nbytes,
        rows=rows, tokens=tokens, capacity=capacity, heads=shape.heads, kv_heads=shape.kv_heads, size=shape.size,
        rotary_dim=shape.rotary_dim, window=shape.window, splits=splits, rope_scaling=shape.rope_scaling,
        epsilon=shape.eps,
        scaling=shape.scaling * LOG2_E * (2 / shape.softcap if cap else 1), softcap=shape.softcap * LOG2_E,
        plus_one=int(shape.plus_one), dependent=0 if binding.prefetchable() else -1,
        **binding.signal_arguments(consumer, "consumer"),
    )  # fmt: skip


def _columns(size: int) -> int:
    """Head size, in columns, of the kernel for heads of `size`."""
    return next(columns for columns in WIDTHS if size <= columns)


@cache
def _entry(size: int, dtype: torch.dtype, device: Device, cache: str) -> Any:
    entry = getattr(libraries.library(library(size, dtype, cache), device), f"accelpatch_{function(cache)}")
    entry.restype, entry.argtypes = ctypes.c_int, [ctypes.POINTER(AttentionArgs), ctypes.c_int, ctypes.c_void_p]
    return entry
