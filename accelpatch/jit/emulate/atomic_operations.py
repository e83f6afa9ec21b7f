"""What atomic operations make of the old value in memory and the data, as functions of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accelpatch.jit.emulate.floats import bf16_to_f32, f32_to_bf16, maximum, minimum
from accelpatch.jit.emulate.wave import Array

U16, U32, U64 = np.uint16, np.uint32, np.uint64


@dataclass(frozen=True)
class Operation:
    """function(old, data) -> new, of `dtype`; compares: function(old, data, compared). words: of the memory."""

    function: Callable[..., Array]
    dtype: type
    words: int = 1
    compares: bool = False


def increment(old: Array, data: Array) -> Array:
    return np.where(old >= data, old.dtype.type(0), old + old.dtype.type(1))


def decrement(old: Array, data: Array) -> Array:
    return np.where((old == 0) | (old > data), data, old - old.dtype.type(1))


def add_bf16(old: Array, data: Array) -> Array:
    return f32_to_bf16(bf16_to_f32(old) + bf16_to_f32(data))


UNSIGNED: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda old, data: old + data,
    "sub": lambda old, data: old - data,
    "rsub": lambda old, data: data - old,
    "inc": increment,
    "dec": decrement,
    "umin": np.minimum,
    "umax": np.maximum,
    "and": lambda old, data: old & data,
    "or": lambda old, data: old | data,
    "xor": lambda old, data: old ^ data,
    "swap": lambda old, data: data,
}
SIGNED: dict[str, Callable[[Array, Array], Array]] = {"smin": np.minimum, "smax": np.maximum}
FLOATS: dict[str, Callable[[Array, Array], Array]] = {"add": UNSIGNED["add"], "min": minimum, "max": maximum}


def exchange(old: Array, data: Array, compared: Array) -> Array:
    return np.where(old == compared, data, old)


#: by the names of global atomics; of 64 bits they end in _x2
OPERATIONS = {
    **{name: Operation(function, U32) for name, function in UNSIGNED.items()},
    **{f"{name}_x2": Operation(function, U64, 2) for name, function in UNSIGNED.items()},
    **{name: Operation(function, np.int32) for name, function in SIGNED.items()},
    **{f"{name}_x2": Operation(function, np.int64, 2) for name, function in SIGNED.items()},
    **{f"{name}_f32": Operation(function, np.float32) for name, function in FLOATS.items()},
    **{f"{name}_f64": Operation(function, np.float64, 2) for name, function in FLOATS.items()},
    "cmpswap": Operation(exchange, U32, 1, True),
    "cmpswap_x2": Operation(exchange, U64, 2, True),
    "pk_add_f16": Operation(UNSIGNED["add"], np.float16),
    "pk_add_bf16": Operation(add_bf16, U16),
}


def apply(
    operation: Operation,
    load: Callable[[Array], Array],
    store: Callable[[Array, Array], None],
    addresses: Array,
    data: Array,
    compared: Array | None,
) -> Array:
    """Do it for all lanes: at once where their addresses differ, else one after the other.

    load(at) and store(at, bytes) are given places in `addresses`; data, compared: uint8[n, bytes]. The old bytes.
    """
    n, size = len(addresses), 4 * operation.words
    old = np.empty((n, size), np.uint8)
    at_once = [np.arange(n)] if len(np.unique(addresses)) == n else [np.array([one]) for one in range(n)]
    for at in at_once:
        old[at] = load(at)
        values: list[Array] = [np.ascontiguousarray(one[at]).view(operation.dtype) for one in (old, data)]
        if compared is not None:
            values.append(np.ascontiguousarray(compared[at]).view(operation.dtype))
        new: Array = operation.function(*values).astype(operation.dtype)
        store(at, np.ascontiguousarray(new).view(np.uint8).reshape(len(at), size))
    return old
