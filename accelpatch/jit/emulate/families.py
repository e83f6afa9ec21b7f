"""All families of instructions; importing this registers them."""

from __future__ import annotations

from accelpatch.jit.emulate import (
    atomics,
    buffer_access,
    dot,
    global_access,
    lanes,
    lds_access,
    matrix,
    packed,
    scalar_alu,
    scalar_control,
    scalar_memory,
    small_floats,
    vector_carry,
    vector_compare,
    vector_convert,
    vector_division,
    vector_float,
    vector_half,
    vector_integer,
)

FAMILIES = (
    atomics,
    buffer_access,
    dot,
    global_access,
    lanes,
    lds_access,
    matrix,
    packed,
    scalar_alu,
    scalar_control,
    scalar_memory,
    small_floats,
    vector_carry,
    vector_compare,
    vector_convert,
    vector_division,
    vector_float,
    vector_half,
    vector_integer,
)
