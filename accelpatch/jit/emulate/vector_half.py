"""16-bit integer arithmetic of vector registers."""

from __future__ import annotations

import numpy as np

from accelpatch.jit.emulate.vector import vector

U16, I16 = np.uint16, np.int16

vector("u16: u16 u16", {
    "v_add_u16": lambda a, b: a + b,
    "v_sub_u16": lambda a, b: a - b,
    "v_subrev_u16": lambda a, b: b - a,
    "v_mul_lo_u16": lambda a, b: a * b,
    "v_lshlrev_b16": lambda a, b: b << (a & U16(15)),
    "v_lshrrev_b16": lambda a, b: b >> (a & U16(15)),
    "v_max_u16": np.maximum,
    "v_min_u16": np.minimum,
})  # fmt: skip
vector("i16: i16 i16", {
    "v_ashrrev_i16": lambda a, b: b >> (a & I16(15)),
    "v_max_i16": np.maximum,
    "v_min_i16": np.minimum,
})  # fmt: skip
vector("i16: i16 i16", {"v_add_i16": lambda a, b: a + b, "v_sub_i16": lambda a, b: a - b}, preserve=True)
vector("u16: u16 u16 u16", {"v_mad_u16": lambda a, b, c: a * b + c}, preserve=True)
vector("i16: i16 i16 i16", {"v_mad_i16": lambda a, b, c: a * b + c}, preserve=True)
vector("u16: u16 u16 u16", {"v_mad_legacy_u16": lambda a, b, c: a * b + c})
vector("i16: i16 i16 i16", {"v_mad_legacy_i16": lambda a, b, c: a * b + c})
for _kind in ("u16", "i16"):
    vector(f"{_kind}: {_kind} {_kind} {_kind}", {
        f"v_min3_{_kind}": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        f"v_max3_{_kind}": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        f"v_med3_{_kind}": lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    }, preserve=True)  # fmt: skip
