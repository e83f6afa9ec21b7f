"""Bytes and floating-point operations of an operation, computed from its arguments, for a roofline.

Bytes are those of each tensor among the arguments, counted once, and of the result where it has the size of x: the
least that has to be moved. Of an embedding they are the rows that are looked up, of experts those that are chosen, of
attention over a cache the slots that hold tokens. Operations are 2 M N K of a linear layer, 4 B H L D of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.spec import Spec

DEPTH = 3  # levels of objects that are searched for tensors: a fused linear layer, its weight, the weight's tensors
EMBEDDINGS = ("int8_embedding", "block_embedding", "packed_embedding")


@dataclass(frozen=True)
class Work:
    """bytes, operations: of one run. sizes: those of the Spec, such as M, N and K; {} without a Spec. what: which part
    of a larger operation it is."""

    bytes: int
    operations: int
    sizes: Mapping[str, int]
    what: str = ""


def work(op: str, spec: Callable[..., Spec], args: Sequence[Any], context: int) -> Work:
    """The Work of one run of the operation `op`. context: tokens in the cache, which only
    the device knows otherwise."""
    if isinstance(args[0], DecodeStep):
        return _of_native(args[0], args[5], args[6], args[1].shape[0], context)
    made = spec(*args)
    sizes = made.sizes
    tensors = list({one.data_ptr(): one for one in _tensors(args)}.values())
    read = sum(one.nbytes for one in tensors)
    if op in EMBEDDINGS:
        return Work(read * sizes["M"] // max(1, sizes["N"]), 0, sizes)
    if op == "decode_attention":
        return _of_attention(args, context, sizes)
    if "E" in sizes and "I" in sizes:
        return _of_experts(tensors, sizes)
    flop = 2 * sizes["M"] * sizes["N"] * sizes["K"] * sizes.get("B", 1) if {"M", "N", "K"} <= set(sizes) else 0
    queries, keys = sizes.get("M", sizes.get("L", 0)), sizes.get("N", sizes.get("S", 0))
    if {"B", "H", "D"} <= set(sizes):
        flop = 4 * sizes["B"] * sizes["H"] * queries * keys * sizes["D"]
    return Work(read, flop, sizes)


def _of_attention(args: Sequence[Any], context: int, sizes: Mapping[str, int]) -> Work:
    """The work of attention of one new token a row over a cache. A window may be shorter than the cached tokens."""
    qkv, keys, values, shape = args[0], args[4], args[5], args[6]
    seen = min(context, sizes["L"], shape.window or context)
    read = qkv.nbytes + (keys.nbytes + values.nbytes) * seen // max(1, sizes["L"])
    return Work(read, 4 * sizes["B"] * sizes["T"] * shape.heads * seen * shape.size, sizes)


def _of_experts(tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Work:
    """The work of the chosen experts, assumed to be all different, as far as there are that many."""
    number, chosen = sizes["E"], sizes.get("M", 1) * sizes.get("k", 1)
    stacks = sum(one.nbytes for one in tensors if one.dim() > 1 and one.shape[0] == number)
    rest = sum(one.nbytes for one in tensors) - stacks
    width, inner = sizes.get("H", 0), sizes["I"]
    return Work(rest + stacks * min(number, chosen) // number, 2 * chosen * 3 * width * inner, sizes)


def _of_native(step: DecodeStep, first: int, last: int, rows: int, context: int) -> Work:
    """The work of layers `first` to `last` of a native step, with embedding and head where these are among them."""
    read, flop, what = 0, 0, "of a layer" if first < last else "of the embedding"
    for place in range(first, last):
        layer = step.layers[place]
        if layer is None:
            continue
        seen = min(context, layer.window or context)
        cached = (step.keys[place].nbytes + step.values[place].nbytes) * rows // step.rows * seen // step.length
        query = layer.linears["q"].n
        read += cached + sum(pack.nbytes for pack in layer.linears.values())
        flop += rows * (sum(2 * pack.n * pack.k for pack in layer.linears.values()) + 4 * query * seen)
        if layer.attends_to_encoder and step.encoded is not None:
            read += sum(one.nbytes for one in step.encoded.states[place])
            flop += rows * 4 * layer.linears["cross_q"].n * step.encoded.length
        if (experts := layer.experts) is not None:
            read += experts.bytes_of(rows)
            each = sum(2 * n * k for n, k in experts.sizes.values())
            flop += rows * (experts.chosen * each + 2 * experts.router.n * experts.router.k)
    if last == len(step.layers):
        read, flop = read + step.head.nbytes, flop + 2 * rows * step.head.n * step.head.k
        what = "of a layer and the head" if first < last else "of the head"
    return Work(read, flop, {"B": rows}, what)


def _tensors(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in a value, in sequences and in the fields of dataclasses in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one, depth)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), depth - 1)
