"""Scalar arithmetic, bits, moves, and the operations that save exec."""

from __future__ import annotations

from functools import partial

from accelpatch.jit.emulate.integers import evaluate, read_integer, write_integer
from accelpatch.jit.emulate.operands import EXEC
from accelpatch.jit.emulate.registry import Decoding, Step, add, instruction
from accelpatch.jit.emulate.scalar import nonzero, scalar
from accelpatch.jit.emulate.wave import ALL, Wave

WORD = 0xFFFFFFFF


def overflows(value: int) -> int:
    return int(not -(1 << 31) <= value < 1 << 31)


def extract(size: int, signed: bool, a: int, field: int) -> int:
    """s_bfe: bits of a; the field has the offset below and the width from bit 16 on."""
    offset, width = field & size - 1, min(field >> 16 & 0x7F, size)
    if signed:
        a -= a >> size - 1 << size
    value = a >> offset & (1 << width) - 1
    return value - (value >> width - 1 << width) if signed and width else value


def first_set(a: int) -> int:
    return (a & -a).bit_length() - 1 if a else -1


def leading_signs(size: int, a: int) -> int:
    """s_flbit_i: bits at the top that equal the sign; -1 where all do."""
    value = ~a if a < 0 else a
    return size - value.bit_length() if value else -1


def reverse(size: int, a: int) -> int:
    return int(f"{a:0{size}b}"[::-1], 2)


def quad_mask(a: int) -> int:
    return sum(1 << at for at in range(16) if a >> 4 * at & 15)


def whole_quads(a: int) -> int:
    return sum(15 << 4 * at for at in range(16) if a >> 4 * at & 15)


def sign_extend(bits: int, a: int) -> int:
    a &= (1 << bits) - 1
    return a - (a >> bits - 1 << bits)


def replicate(a: int) -> int:
    return sum(3 << 2 * at for at in range(32) if a >> at & 1)


scalar("u32: u32", {
    "s_mov_b32": lambda a: a,
    "s_brev_b32": partial(reverse, 32),
    "s_ff1_i32_b32": first_set,
    "s_ff0_i32_b32": lambda a: first_set(~a & WORD),
    "s_flbit_i32_b32": lambda a: 32 - a.bit_length() if a else -1,
    "s_sext_i32_i8": partial(sign_extend, 8),
    "s_sext_i32_i16": partial(sign_extend, 16),
})  # fmt: skip
scalar("u32: i32", {"s_flbit_i32": partial(leading_signs, 32), "s_movk_i32": partial(sign_extend, 16)})
scalar("u32: u64", {
    "s_ff1_i32_b64": first_set,
    "s_ff0_i32_b64": lambda a: first_set(~a & ALL),
    "s_flbit_i32_b64": lambda a: 64 - a.bit_length() if a else -1,
})  # fmt: skip
scalar("u32: i64", {"s_flbit_i32_i64": partial(leading_signs, 64)})
scalar("u64: u64", {"s_mov_b64": lambda a: a, "s_brev_b64": partial(reverse, 64)})
scalar("u64: u32", {"s_bitreplicate_b64_b32": replicate})
scalar("u32: u32", {
    "s_not_b32": lambda a: ~a,
    "s_bcnt1_i32_b32": int.bit_count,
    "s_bcnt0_i32_b32": lambda a: 32 - a.bit_count(),
}, nonzero)  # fmt: skip
scalar("u32: i32", {"s_abs_i32": abs}, nonzero)
scalar("u32: u64", {"s_bcnt1_i32_b64": int.bit_count, "s_bcnt0_i32_b64": lambda a: 64 - a.bit_count()}, nonzero)
scalar("u64: u64", {"s_not_b64": lambda a: ~a, "s_wqm_b64": whole_quads, "s_quadmask_b64": quad_mask}, nonzero)
BITWISE = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
}
scalar("u32: u32 u32", {f"s_{name}_b32": function for name, function in BITWISE.items()}, nonzero)
scalar("u64: u64 u64", {f"s_{name}_b64": function for name, function in BITWISE.items()}, nonzero)
scalar("u32: u32 u32", {
    "s_lshl_b32": lambda a, b: a << (b & 31),
    "s_lshr_b32": lambda a, b: a >> (b & 31),
    "s_bfe_u32": partial(extract, 32, False),
    "s_bfe_i32": partial(extract, 32, True),
}, nonzero)  # fmt: skip
scalar("i32: i32 u32", {"s_ashr_i32": lambda a, b: a >> (b & 31)}, nonzero)
scalar("u64: u64 u32", {
    "s_lshl_b64": lambda a, b: a << (b & 63),
    "s_lshr_b64": lambda a, b: a >> (b & 63),
    "s_bfe_u64": partial(extract, 64, False),
    "s_bfe_i64": partial(extract, 64, True),
}, nonzero)  # fmt: skip
scalar("i64: i64 u32", {"s_ashr_i64": lambda a, b: a >> (b & 63)}, nonzero)
scalar("i32: i32 i32", {"s_absdiff_i32": lambda a, b: abs(a - b)}, nonzero)
scalar("u32: u32 u32", {
    "s_add_u32": lambda a, b: (a + b, a + b > WORD),
    "s_sub_u32": lambda a, b: (a - b, b > a),
    "s_min_u32": lambda a, b: (min(a, b), a < b),
    "s_max_u32": lambda a, b: (max(a, b), a >= b),
    **{f"s_lshl{n}_add_u32": lambda a, b, n=n: ((a << n) + b, (a << n) + b > WORD) for n in (1, 2, 3, 4)},
}, "pair")  # fmt: skip
scalar("i32: i32 i32", {
    "s_add_i32": lambda a, b: (a + b, overflows(a + b)),
    "s_sub_i32": lambda a, b: (a - b, overflows(a - b)),
    "s_min_i32": lambda a, b: (min(a, b), a < b),
    "s_max_i32": lambda a, b: (max(a, b), a >= b),
}, "pair")  # fmt: skip
scalar("u32: u32 u32", {
    "s_mul_i32": lambda a, b: a * b,
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "s_pack_ll_b32_b16": lambda a, b: a & 0xFFFF | b << 16,
    "s_pack_lh_b32_b16": lambda a, b: a & 0xFFFF | b & 0xFFFF0000,
    "s_pack_hh_b32_b16": lambda a, b: a >> 16 | b & 0xFFFF0000,
})  # fmt: skip
scalar("i32: i32 i32", {"s_mul_hi_i32": lambda a, b: a * b >> 32})
scalar("u64: u32 u32", {"s_bfm_b64": lambda a, b: ((1 << (a & 63)) - 1) << (b & 63)})


@instruction("s_addc_u32 s_subb_u32")
def carry(d: Decoding) -> Step:
    store = write_integer(d, d.operand())
    a, b = read_integer(d, d.operand()), read_integer(d, d.operand())
    sign = 1 if d.mnemonic == "s_addc_u32" else -1

    def execute(w: Wave) -> None:
        total = a(w) + sign * (b(w) + w.scc)
        store(w, total)
        w.scc = int(not 0 <= total <= WORD)

    return execute


@instruction("s_cselect_b32 s_cselect_b64")
def select(d: Decoding) -> Step:
    words, kind = (1, "u32") if d.mnemonic.endswith("32") else (2, "u64")
    store = write_integer(d, d.operand(), words)
    a, b = read_integer(d, d.operand(), kind), read_integer(d, d.operand(), kind)
    return lambda w: store(w, a(w) if w.scc else b(w))


@instruction("s_cmov_b32 s_cmov_b64 s_cmovk_i32")
def conditional_move(d: Decoding) -> Step:
    words, kind = (2, "u64") if d.mnemonic.endswith("64") else (1, "i32")
    store, a = write_integer(d, d.operand(), words), read_integer(d, d.operand(), kind)
    return lambda w: store(w, a(w)) if w.scc else None


@instruction("s_addk_i32 s_mulk_i32")
def with_constant(d: Decoding) -> Step:
    operand = d.operand()
    read, store = read_integer(d, operand, "i32"), write_integer(d, operand)
    number = sign_extend(16, evaluate(d, d.operand().text))
    if d.mnemonic == "s_mulk_i32":
        return lambda w: store(w, read(w) * number)

    def execute(w: Wave) -> None:
        total = read(w) + number
        store(w, total)
        w.scc = overflows(total)

    return execute


@instruction("s_bitset0_b32 s_bitset1_b32 s_bitset0_b64 s_bitset1_b64")
def set_bit(d: Decoding) -> Step:
    words, kind = (2, "u64") if d.mnemonic.endswith("64") else (1, "u32")
    operand = d.operand()
    read, store, at = read_integer(d, operand, kind), write_integer(d, operand, words), read_integer(d, d.operand())
    size = 32 * words - 1
    if d.mnemonic.startswith("s_bitset1"):
        return lambda w: store(w, read(w) | 1 << (at(w) & size))
    return lambda w: store(w, read(w) & ~(1 << (at(w) & size)))


def save_exec(name: str, d: Decoding) -> Step:
    """exec goes to the destination and becomes what the operation makes of it and the source; scc: whether any lane."""
    store, source = write_integer(d, d.operand(), 2), read_integer(d, d.operand(), "u64")
    operation, swapped, keeps = SAVING[name]
    d.writes += [EXEC, EXEC + 1]
    function = BITWISE[operation]

    def execute(w: Wave) -> None:
        before, a = w.exec, source(w)
        after = (function(before, a) if swapped else function(a, before)) & ALL
        w.set_exec(after)
        store(w, before if keeps else after)
        w.scc = int(after != 0)

    return execute


#: name -> (operation, whether exec is its first operand, whether the old exec is what is stored)
SAVING = {
    **{f"s_{name}_saveexec_b64": (name, False, True) for name in BITWISE},
    "s_andn1_saveexec_b64": ("andn2", True, True),
    "s_orn1_saveexec_b64": ("orn2", True, True),
    "s_andn1_wrexec_b64": ("andn2", True, False),
    "s_andn2_wrexec_b64": ("andn2", False, False),
}
for _name in SAVING:
    add(_name, partial(save_exec, _name))
