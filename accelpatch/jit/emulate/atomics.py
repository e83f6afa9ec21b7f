"""Atomic operations on global memory, through flat addresses and on LDS."""

from __future__ import annotations

from functools import partial

import numpy as np

from accelpatch.jit.emulate.atomic_operations import OPERATIONS, Operation, apply
from accelpatch.jit.emulate.global_access import addresses_of, by_space
from accelpatch.jit.emulate.memory import OutOfBounds
from accelpatch.jit.emulate.registry import Decoding, Step, add
from accelpatch.jit.emulate.transfers import Form, checked, get, out_of_bounds, put
from accelpatch.jit.emulate.vector import row_of
from accelpatch.jit.emulate.wave import Array, Wave

Data = tuple[Array, Array | None]


def form_of(operation: Operation) -> Form:
    return Form(4 * operation.words, operation.words)


def data_of(w: Wave, row: int, operation: Operation, lanes: Array) -> Data:
    """The data of the lanes, and behind it what cmpswap compares with."""
    form = form_of(operation)
    compared = get(w, row + operation.words, form, lanes) if operation.compares else None
    return get(w, row, form, lanes), compared


def on_lds(w: Wave, d: Decoding, operation: Operation, at: Array, data: Data, lanes: Array) -> Array:
    lds, which = w.group.lds, np.flatnonzero(lanes)

    def some(chosen: Array) -> Array:
        mask = np.zeros(64, bool)
        mask[which[chosen]] = True
        return mask

    def store(chosen: Array, new: Array) -> None:
        lds.store(w, d.line, at[chosen], new, some(chosen), atomic=True)

    return apply(
        operation,
        lambda chosen: lds.load(w, d.line, at[chosen], 4 * operation.words, some(chosen), atomic=True),
        store,
        at,
        *data,
    )


def on_memory(w: Wave, d: Decoding, operation: Operation, at: Array, data: Data, lanes: Array) -> Array:
    memory = w.group.memory
    try:
        memory.load(at, 4 * operation.words)
    except OutOfBounds as error:
        raise out_of_bounds(d, w, at, lanes, error) from None

    def store(chosen: Array, new: Array) -> None:
        try:
            memory.store(at[chosen], new)
        except OutOfBounds as error:
            raise out_of_bounds(d, w, at, lanes, OutOfBounds(int(chosen[0]), error.words, error.read_only)) from None

    return apply(operation, lambda chosen: memory.load(at[chosen], 4 * operation.words), store, at, *data)


def build_global(operation: Operation, flat: bool, d: Decoding) -> Step:
    form = form_of(operation)
    returns = d.flag("sc0") if d.arch != "gfx90a" else d.flag("glc")
    into = row_of(d, d.writing(d.operand(form.words)), form.words) if returns else -1
    lanes_operand = d.operand()
    count = form.words * (1 + operation.compares)
    row = row_of(d, d.reading(d.operand(count)), count)
    addresses, check = addresses_of(d, lanes_operand, "flat" if flat else "global"), checked(d, form.bytes)
    line, registers, kind = d.line, tuple(d.writes), "flat" if flat else "vector"

    def execute(w: Wave) -> None:
        if w.exec:
            every = addresses(w)[w.mask]
            check(w, every, w.mask, True)
            for where, at, lanes in by_space(every, w.mask, flat):
                if where == "private":
                    raise line.fault("the emulator has no atomics on private memory")
                data = data_of(w, row, operation, lanes)
                old = (on_lds if where == "lds" else on_memory)(w, d, operation, at, data, lanes)
                if returns:
                    put(w, into, form, old, lanes)
        w.waits.add(kind, line, registers)

    return execute


def build_lds(operation: Operation, returns: bool, d: Decoding) -> Step:
    form = form_of(operation)
    into = row_of(d, d.writing(d.operand(form.words)), form.words) if returns else -1
    address = row_of(d, d.reading(d.operand(1)))
    rows = [row_of(d, d.reading(d.operand(form.words)), form.words) for _ in range(1 + operation.compares)]
    offset, check = d.number("offset"), checked(d, form.bytes)
    line, registers = d.line, tuple(d.writes)

    def execute(w: Wave) -> None:
        later = None
        if w.exec:
            at = w.u32[address, w.mask].astype(np.int64) + offset
            check(w, at.astype(np.uint64), w.mask, True)
            values = [get(w, row, form, w.mask) for row in rows]
            # ds_cmpst has what it compares with first, and then the data
            data = (values[1], values[0]) if operation.compares else (values[0], None)
            old = on_lds(w, d, operation, at, data, w.mask)
            if returns:
                put(w, into, form, old, w.mask)
            later = w.group.lds.later(w, line, at, form.bytes, True)
        w.waits.add("lds", line, registers, later)

    return execute


LATER = "gfx942 gfx950"  # than gfx90a, which lacks some
#: LDS's name -> the global one's; {} is where _rtn goes
LDS_NAMES = {
    **{f"ds_{name}{{}}_u32": name for name in ("add", "sub", "rsub", "inc", "dec")},
    **{f"ds_{name}{{}}_b32": name for name in ("and", "or", "xor")},
    **{
        f"ds_{name}{{}}_{kind}32": f"{sign}{name}" for name in ("min", "max") for kind, sign in (("i", "s"), ("u", "u"))
    },
    **{f"ds_{name}{{}}_f32": f"{name}_f32" for name in ("add", "min", "max")},
    **{f"ds_{name}{{}}_f64": f"{name}_f64" for name in ("add", "min", "max")},
    "ds_pk_add{}_f16": "pk_add_f16",
    "ds_pk_add{}_bf16": "pk_add_bf16",
    "ds_cmpst{}_b32": "cmpswap",
    "ds_cmpst{}_b64": "cmpswap_x2",
    **{f"ds_{name}{{}}_u64": f"{name}_x2" for name in ("add", "sub", "rsub", "inc", "dec")},
    **{f"ds_{name}{{}}_b64": f"{name}_x2" for name in ("and", "or", "xor")},
    **{
        f"ds_{name}{{}}_{kind}64": f"{sign}{name}_x2"
        for name in ("min", "max")
        for kind, sign in (("i", "s"), ("u", "u"))
    },
}
for _name, _operation in OPERATIONS.items():
    if not _name.startswith(("rsub", "min_f32", "max_f32")):
        _flat = _name in ("add_f32", "pk_add_f16", "pk_add_bf16")
        add(f"global_atomic_{_name}", partial(build_global, _operation, False), LATER * (_name == "pk_add_bf16"))
        add(f"flat_atomic_{_name}", partial(build_global, _operation, True), LATER * _flat)
for _name, _other in LDS_NAMES.items():
    for _returns in (False, True):
        _builder = partial(build_lds, OPERATIONS[_other], _returns)
        add(_name.format("_rtn" * _returns), _builder, LATER * _other.startswith("pk_"))
add("ds_wrxchg_rtn_b32", partial(build_lds, OPERATIONS["swap"], True))
add("ds_wrxchg_rtn_b64", partial(build_lds, OPERATIONS["swap_x2"], True))
