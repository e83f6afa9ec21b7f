"""Scalar comparisons, branches, barriers, waits, and the instructions that only steer the hardware."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial

from accelpatch.jit.emulate.integers import evaluate, read_integer, write_integer
from accelpatch.jit.emulate.operands import VCC
from accelpatch.jit.emulate.registry import Decoding, Step, add, instruction
from accelpatch.jit.emulate.waits import LIMITS
from accelpatch.jit.emulate.wave import Wave

BARRIER, END = "barrier", "end"
TESTS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "lg": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip
CONDITIONS: dict[str, Callable[[Wave], object]] = {
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: not (w.s[VCC] | w.s[VCC + 1]),
    "s_cbranch_vccnz": lambda w: w.s[VCC] | w.s[VCC + 1],
    "s_cbranch_execz": lambda w: not w.exec,
    "s_cbranch_execnz": lambda w: w.exec,
    "s_branch": lambda w: True,
}


def compare(test: Callable[[int, int], bool], kind: str, d: Decoding) -> Step:
    a, b = read_integer(d, d.operand(), kind), read_integer(d, d.operand(), kind)

    def execute(w: Wave) -> None:
        w.scc = int(test(a(w), b(w)))

    return execute


def compare_bit(wanted: int, kind: str, d: Decoding) -> Step:
    a, at = read_integer(d, d.operand(), kind), read_integer(d, d.operand())
    size = int(kind[1:]) - 1

    def execute(w: Wave) -> None:
        w.scc = int(a(w) >> (at(w) & size) & 1 == wanted)

    return execute


def compare_constant(test: Callable[[int, int], bool], kind: str, d: Decoding) -> Step:
    """s_cmpk: with 16 bits, extended as the kind says."""
    a, number = read_integer(d, d.operand(), kind), evaluate(d, d.operand().text) & 0xFFFF
    if kind == "i32":
        number -= number >> 15 << 16

    def execute(w: Wave) -> None:
        w.scc = int(test(a(w), number))

    return execute


for _name, _test in TESTS.items():
    for _kind in ("u32", "i32"):
        add(f"s_cmp_{_name}_{_kind}", partial(compare, _test, _kind))
        add(f"s_cmpk_{_name}_{_kind}", partial(compare_constant, _test, _kind))
add("s_cmp_eq_u64", partial(compare, operator.eq, "u64"))
add("s_cmp_lg_u64", partial(compare, operator.ne, "u64"))
for _wanted in (0, 1):
    for _bits in ("32", "64"):
        add(f"s_bitcmp{_wanted}_b{_bits}", partial(compare_bit, _wanted, f"u{_bits}"))


def branch(condition: Callable[[Wave], object], d: Decoding) -> Step:
    name = d.operand().text
    if name not in d.program.labels:
        raise d.line.fault(f"there is no label {name}")
    target = d.program.labels[name]
    if "vcc" in d.mnemonic:
        d.reads += [VCC, VCC + 1]

    def execute(w: Wave) -> None:
        if condition(w):
            w.pc = target

    return execute


for _name, _condition in CONDITIONS.items():
    add(_name, partial(branch, _condition))


@instruction("s_barrier")
def barrier(d: Decoding) -> Step:
    return lambda w: BARRIER


@instruction("s_endpgm s_endpgm_saved")
def end(d: Decoding) -> Step:
    return lambda w: END


@instruction("s_trap")
def trap(d: Decoding) -> Step:
    line, number = d.line, d.operand().text

    def execute(w: Wave) -> None:
        raise line.fault(f"the kernel stops itself with trap {number}, as __builtin_trap and failed assertions do")

    return execute


@instruction("s_waitcnt")
def wait(d: Decoding) -> Step:
    counts: dict[str, int] = {}
    while d.left:
        text = d.operand().text
        found = re.findall(r"(vmcnt|lgkmcnt|expcnt)\s*(_sat)?\(\s*(\w+)\s*\)", text)
        if not found:
            code = evaluate(d, text)
            counts |= {"vmcnt": code & 15 | code >> 10 & 48, "expcnt": code >> 4 & 7, "lgkmcnt": code >> 8 & 15}
        for name, saturates, number in found:
            counts[name] = int(number, 0)
            if counts[name] > LIMITS[name] and not saturates:
                raise d.line.fault(f"{name} counts to {LIMITS[name]}")
    counts.pop("expcnt", None)  # exports and GDS alone stand in it
    counters = tuple((name, number) for name, number in counts.items() if number < LIMITS[name])

    def execute(w: Wave) -> None:
        for name, number in counters:
            w.waits.wait(name, number)

    return execute


IDLE = """s_nop s_sleep s_setprio s_sethalt s_icache_inv s_dcache_inv s_dcache_wb s_dcache_inv_vol s_dcache_wb_vol
s_incperflevel s_decperflevel s_ttracedata s_set_gpr_idx_off s_sendmsg s_sendmsghalt s_setkill s_wakeup
buffer_wbl2 v_nop ds_nop"""


@instruction("buffer_invl2 buffer_wbinvl1 buffer_wbinvl1_vol", "gfx90a")
@instruction("buffer_inv", "gfx942 gfx950")
@instruction(IDLE)
def idle(d: Decoding) -> Step:
    """Order and caches: all stores of the emulator are seen at once."""
    while d.left:
        d.operand()
    for name in ("sc0", "sc1", "nt", "glc", "slc"):
        d.flag(name)
    return lambda w: None


@instruction("s_setreg_b32 s_setreg_imm32_b32")
def set_hardware(d: Decoding) -> Step:
    """Only what changes no result: the emulator rounds to nearest even and keeps subnormals."""
    name, offset, width = _field(d)
    value = read_integer(d, d.operand())
    line = d.line

    def execute(w: Wave) -> None:
        written = value(w) & (1 << width) - 1
        mode = w.mode & ~((1 << width) - 1 << offset) | written << offset
        if name != "HW_REG_MODE" or (mode ^ w.mode) & 0xFF:
            raise line.fault("the emulator rounds to nearest even and keeps subnormals, and can set nothing else")

    return execute


@instruction("s_getreg_b32")
def get_hardware(d: Decoding) -> Step:
    store = write_integer(d, d.operand())
    name, offset, width = _field(d)
    if name != "HW_REG_MODE":
        raise d.line.fault(f"the emulator does not know {name}")
    return lambda w: store(w, w.mode >> offset & (1 << width) - 1)


def _field(d: Decoding) -> tuple[str, int, int]:
    text = d.operand().text
    found = re.fullmatch(r"hwreg\((\w+)\s*(?:,\s*(\d+)\s*,\s*(\d+)\s*)?\)", text)
    if found is None:
        raise d.line.fault(f"{text} is no hwreg(NAME, OFFSET, WIDTH)")
    return found[1], int(found[2] or 0), int(found[3] or 32)


@instruction("s_getpc_b64")
def program_counter(d: Decoding) -> Step:
    """0: what is added to it, the distance of a constant, is the constant's address here."""
    store = write_integer(d, d.operand(), 2)
    return lambda w: store(w, 0)


@instruction("s_memtime s_memrealtime")
def clock(d: Decoding) -> Step:
    store = write_integer(d, d.operand(), 2)
    line, registers = d.line, tuple(d.writes)

    def execute(w: Wave) -> None:
        store(w, w.steps)
        w.waits.add("scalar", line, registers)

    return execute
