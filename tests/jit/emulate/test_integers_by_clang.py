"""What clang makes of integer arithmetic, branches and loops, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from accelpatch.jit.emulate import run
from tests.support.amdgcn import ARCH_CASES, compiled, needs_clang

pytestmark = needs_clang
SOURCE = "tests/jit/emulate/hip/integers.hip"
COUNT = 200
EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 1000, 0x7FFF, 0x8000, 0xFFFF, 0x10000, -1, -2, -7, -1000, -0x8000]


def wrapped(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> bits - 1 else value


def inputs(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of edges and of random numbers of all sizes."""
    bits, signed = np.dtype(dtype).itemsize * 8, np.dtype(dtype).kind == "i"
    rng = np.random.default_rng(bits + signed)
    edges = [*EDGES, (1 << bits - 1) - 1, 1 << bits - 1]
    found = [
        [wrapped(int(one), bits, signed) for one in rng.choice(edges, 60).tolist()]
        + [
            wrapped(int(rng.integers(1 << 63)) * 2 + 1 >> int(rng.integers(64)), bits, signed)
            for _ in range(COUNT - 60)
        ]
        for _ in range(2)
    ]
    return np.array(found[0], dtype), np.array(found[1], dtype)


def divided(a: int, b: int) -> tuple[int, int]:
    """Quotient and remainder as in C."""
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - quotient * b


def bytes_of(a: int, signed: bool, bits: int = 8) -> list[int]:
    return [wrapped(a >> at, bits, signed) for at in range(0, 32, bits)]


def joined(parts: list[int], bits: int = 16) -> int:
    return sum((one & (1 << bits) - 1) << bits * at for at, one in enumerate(parts))


def signed32(a: int, b: int) -> list[int]:
    c = 1 if b == 0 or (a == -(1 << 31) and b == -1) else b
    field = wrapped((a >> (b & 31)) & 31, 5, True) if (b & 31) + 5 <= 32 else a >> (b & 31)
    narrow = wrapped(a >> 8, 8, True) + wrapped(b, 16, True)
    return [
        *divided(a, c), a * b, a * b >> 32, a >> (b & 31), min(a, b), max(a, b), divided(a, 7)[0], divided(a, 1000)[1],
        field, narrow, abs(a),
    ]  # fmt: skip


def unsigned32(a: int, b: int) -> list[int]:
    c, left = b or 1, b & 31
    both = a << 32 | b
    permuted = [both >> 8 * at & 255 if at < 8 else 0 for at in (4, 7, 1, 12)]
    return [
        a // c, a % c, a * b >> 32, a << left | a >> (32 - left & 31), a.bit_count() + 32 - (b | 1).bit_length(),
        (b & -b).bit_length(), int(f"{a:032b}"[::-1], 2), a // 10, joined(permuted, 8), both >> 13,
        a & 0xFF00FF00 | b & 0x00FF00FF, (a >> 7 & 0x7FF) + ((a + b) % (1 << 32) < a),
    ]  # fmt: skip


def signed64(a: int, b: int) -> list[int]:
    c = 1 if b == 0 or (a == -(1 << 63) and b == -1) else b
    product = wrapped(a, 32, True) * wrapped(b, 32, True)
    return [
        *divided(a, c), a * b, a * b >> 64, a >> (b & 63), a - b, min(a, b), product + b, divided(a, 1000003)[0],
        int(a > b and a != 0),
    ]  # fmt: skip


def unsigned64(a: int, b: int) -> list[int]:
    c = b or 1
    low = (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF)
    return [
        a // c, a % c, a * b >> 64, a << (b & 63), a >> (b & 63), a.bit_count() + 64 - (b | 1).bit_length(), a + b,
        low + a,
    ]  # fmt: skip


def narrow(a: int, b: int) -> list[int]:
    p, q = bytes_of(a, True, 16), bytes_of(b, True, 16)
    u, v = bytes_of(a, False, 16), bytes_of(b, False, 16)

    def dot(signed: bool, bits: int) -> int:
        return sum(x * y for x, y in zip(bytes_of(a, signed, bits), bytes_of(b, signed, bits), strict=True))

    return [
        joined([p[0] + q[0], p[1] + q[1]]), joined([p[0] * q[0], p[1] * q[1]]),
        joined([max(p[0], q[0]), max(p[1], q[1])]), joined([min(u[0], v[0]), min(u[1], v[1])]),
        joined([p[0] >> 3, p[1] >> 5]),
        joined([u[0] << (v[0] & 15), u[1] << (v[1] & 15)]), dot(True, 8) + 1000, dot(False, 8) + 77, dot(True, 16) - 5,
        dot(True, 4) + 3,
    ]  # fmt: skip


def collatz(a: int, b: int) -> list[int]:
    v, steps = a & 0xFFF, 0
    while v > 1:
        v = 3 * v + 1 if v & 1 else v >> 1
        steps += 1
        if steps == 100:
            break
        if v % 37 == 5:
            steps += sum(j & v for j in range(b & 3))
            continue
        if steps > 60 and v < 20:
            return [-77]
    cases: dict[int, Callable[[int], int]] = {
        0: lambda n: n + 1000,
        1: lambda n: n * 3 - 5,
        2: lambda n: n - 5,
        5: lambda n: n ^ 0x55,
    }
    return [cases.get(b & 7, lambda n: -n)(steps)]


KERNELS: dict[str, tuple[type, Callable[[int, int], list[int]]]] = {
    "signed32": (np.int32, signed32),
    "unsigned32": (np.uint32, unsigned32),
    "signed64": (np.int64, signed64),
    "unsigned64": (np.uint64, unsigned64),
    "narrow": (np.int32, narrow),
    "collatz": (np.int32, collatz),
}


@pytest.mark.parametrize("arch", ARCH_CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_it_is_what_python_says(name: str, arch: str) -> None:
    dtype, reference = KERNELS[name]
    a, b = inputs(dtype)
    bits, signed = a.itemsize * 8, np.dtype(dtype).kind == "i"
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    wanted = [[wrapped(one, bits, signed) for one in reference(x, y)] for x, y in pairs]
    out = np.full((COUNT, len(wanted[0])), -77 if signed else 77, dtype)
    arguments = [("global_buffer", one) for one in (a, b, out)]
    run(compiled(arch, SOURCE), name, [2], [128], [*arguments, ("int", COUNT)], arch=arch, strict=False, seed=3)
    for row in range(COUNT):
        assert out[row].tolist() == wanted[row], f"{pairs[row]}"


@pytest.mark.parametrize("arch", ARCH_CASES)
def test_tables_in_constant_memory(arch: str) -> None:
    table = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    a, b = inputs(np.int32)
    out = np.zeros(COUNT, np.int32)
    arguments = [("global_buffer", one) for one in (a, b, out)]
    run(compiled(arch, SOURCE), "tables", [2], [128], [*arguments, ("int", COUNT)], arch=arch, strict=False)
    wanted = [
        wrapped(table[x + (y & 7) & 15] * y + table[i // 128], 32, True)
        for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True))
    ]
    assert out.tolist() == wanted
