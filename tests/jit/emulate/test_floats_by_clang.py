"""What clang makes of float arithmetic, functions and conversions, run in the emulator and compared with numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from accelpatch.jit.emulate import run
from tests.support.amdgcn import ARCH_CASES, compiled, needs_clang

pytestmark = needs_clang
SOURCE = "tests/jit/emulate/hip/floats.hip"
COUNT = 256
F16, F32, F64 = np.float16, np.float32, np.float64
ARCHS = pytest.mark.parametrize("arch", ARCH_CASES)
Array = np.ndarray


def launch(arch: str, name: str, a: Array, b: Array, columns: int, dtype: type) -> list[Array]:
    out = np.full((COUNT, columns), 77, dtype)
    arguments = [("global_buffer", one) for one in (a, b, out)]
    run(compiled(arch, SOURCE), name, [4], [64], [*arguments, ("int", COUNT)], arch=arch, strict=False)
    return list(out.T)


def numbers(dtype: type, seed: int, bits: bool) -> Array:
    """Edges, numbers near one, and (with `bits`) all bit patterns."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(COUNT).astype(dtype) * dtype(4)
    if bits:
        raw = rng.integers(1 << 63, size=COUNT, dtype=np.uint64).astype(f"u{made.itemsize}")
        made[::2] = (raw << raw.dtype.type(1)).view(dtype)[::2]
        tiny = np.finfo(dtype).tiny
        edges = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, tiny, tiny / 8, -tiny / 3, np.finfo(dtype).max, 0.5, 1.5, 2.5]
        made[:14] = rng.permutation(np.array(edges, dtype))
        made[14:28] = np.array(edges, dtype)
    return made


def fused(a: float, b: float, c: float, dtype: type) -> float:
    if not np.isfinite([a, b, c]).all():
        return float(dtype(a) * dtype(b) + dtype(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return float(dtype(a) * dtype(b) + dtype(c))
    if dtype is F64:
        try:
            return float(exact)
        except OverflowError:
            return np.inf if exact > 0 else -np.inf
    return float(rounded(exact))


def rounded(exact: Fraction) -> np.float32:
    """A fraction to the nearest float32, by comparing it with the two next to its float64."""
    near = F32(float(exact))
    around = [near, np.nextafter(near, F32(-np.inf)), np.nextafter(near, F32(np.inf))]
    finite = [one for one in around if np.isfinite(one)]
    if len(finite) < 3:
        return near
    best = min(abs(Fraction(float(one)) - exact) for one in finite)
    ties = [one for one in finite if abs(Fraction(float(one)) - exact) == best]
    return min(ties, key=lambda one: int(one.view(np.uint32)) & 1)


def same(found: Array, wanted: Array) -> None:
    """Equal to the bit, but for which NaN it is."""
    wanted = np.asarray(wanted).astype(found.dtype)
    number = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(found), ~number)
    raw = f"u{found.itemsize}"
    assert np.array_equal(found[number].view(raw), wanted[number].view(raw))


@ARCHS
@pytest.mark.parametrize(("name", "dtype"), [("exact32", F32), ("exact64", F64)])
@np.errstate(all="ignore")
def test_what_is_rounded_once(arch: str, name: str, dtype: type) -> None:
    a, b = numbers(dtype, 1, True), numbers(dtype, 2, True)
    fma = np.array([fused(float(x), float(y), -float(x), dtype) for x, y in zip(a, b, strict=True)], dtype)
    common = [a + b, a * b, a / b, np.sqrt(np.abs(a)), fma, np.floor(a)]
    if dtype is F32:
        by = np.nan_to_num(b.astype(F64), nan=0).clip(-(2.0**31), 2.0**31 - 1).astype(np.int64) & 31
        maximum, minimum = np.fmax(a, b), np.fmin(a, b)
        wanted = [*common, np.rint(b), np.trunc(a), np.ceil(b), maximum, minimum, np.copysign(a, b)]
        wanted += [np.ldexp(a, by), a - b]
    else:
        wanted = [*common, np.rint(b), np.fmax(a, b), a.astype(F32).astype(F64), a - b]
    for found, right in zip(launch(arch, name, a, b, len(wanted), dtype), wanted, strict=True):
        same(found + dtype(0), right + dtype(0))  # of -0 and +0 the larger may be either


def close(found: Array, wanted: Array, units: float) -> None:
    """Within so many units in the last place of the result, and the same where it is not finite."""
    wanted = wanted.astype(F64)
    right = wanted.astype(found.dtype)
    finite = np.isfinite(right)
    assert np.array_equal(np.isnan(found), np.isnan(right))
    assert np.array_equal(found[~finite], right[~finite], equal_nan=True)
    unit = np.spacing(np.maximum(np.abs(right[finite]), np.finfo(found.dtype).tiny)).astype(F64)
    assert (np.abs(found[finite].astype(F64) - wanted[finite]) / unit).max() <= units


@ARCHS
@np.errstate(all="ignore")
def test_functions_are_as_good_as_the_libraries_say(arch: str) -> None:
    a, b = numbers(F32, 3, False), numbers(F32, 4, False)
    x, y = a.astype(F64), b.astype(F64)
    p = np.abs(x)
    erf = torch.erf(torch.from_numpy(x)).numpy()
    power = np.power(p, (b * F32(0.01)).astype(F64))
    wanted = [
        np.exp(x),
        np.log(p),
        np.exp2(x),
        np.log2(p),
        1 / np.sqrt(p),
        np.tanh(x),
        np.sin(x),
        np.cos(y),
        power,
        erf,
    ]
    for found, right in zip(launch(arch, "functions", a, b, 10, F32), wanted, strict=True):
        close(found, right, 4)
    a, b = numbers(F64, 5, False), numbers(F64, 6, False)
    wanted = [np.exp(a), np.log(np.abs(a)), 1 / np.sqrt(np.abs(a)), np.tanh(b)]
    for found, right in zip(launch(arch, "functions64", a, b, 4, F64), wanted, strict=True):
        close(found, right, 4)


@ARCHS
@np.errstate(all="ignore")
def test_conversions_to_integers(arch: str) -> None:
    rng = np.random.default_rng(7)
    scale = np.exp2(rng.uniform(-3, 30.9, COUNT))
    a, b = (np.copysign(scale, rng.standard_normal(COUNT)).astype(F32), numbers(F32, 8, False) * F32(2.0**55))
    b[:3], b[3:6] = (np.nan, np.inf, -np.inf), a[3:6]
    found = launch(arch, "to_integers", a, b, 6, np.int64)
    finite = np.isfinite(b)
    assert found[0].tolist() == [int(x) for x in a]
    assert found[1].tolist() == [int(abs(x)) for x in a]
    assert found[2][finite].tolist() == [int(y) for y in b[finite]]
    assert found[3][finite].tolist() == [int(abs(y)) for y in b[finite]]
    compared = (a < b) | (a <= b) << 1 | (a == b) << 2 | (a != b) << 3 | ~(a < b) << 4 | (a > b) << 5 | ~(a >= b) << 6
    assert found[4].tolist() == compared.tolist()
    classes = np.isnan(a) | np.isinf(a) << 1 | finite << 2 | np.signbit(b) << 3
    assert found[5].tolist() == classes.tolist()


@ARCHS
def test_conversions_from_integers(arch: str) -> None:
    rng = np.random.default_rng(9)
    a, b = (rng.integers(-(1 << 63), (1 << 63) - 1, COUNT) >> rng.integers(0, 63, COUNT) for _ in range(2))
    found = launch(arch, "from_integers", a, b, 6, F32)
    low, unsigned = a.astype(np.int32), a.astype(np.uint32)
    sums = (a & 255).astype(F32) + (a >> 8 & 255).astype(F32)
    doubles = (b.astype(np.int32).astype(F64) + unsigned.astype(F64)).astype(F32)
    wide = a.astype(np.uint64).astype(F32)
    wanted = [low.astype(F32), unsigned.astype(F32), a.astype(F32), wide, sums, doubles]
    for one, right in zip(found, wanted, strict=True):
        same(one, right)


@ARCHS
@np.errstate(all="ignore")
def test_halves(arch: str) -> None:
    a, b = (numbers(F16, seed, True).astype(F32) * F32(1.001) for seed in (10, 11))
    b[np.abs(b) < 2.0**-14] = 1  # gfx90a's dot product has no subnormals
    a[np.abs(a) < 2.0**-14] = 2
    a, b = (np.where(np.isfinite(one), one, F32(3)) for one in (a, b))
    x, y = a.astype(F16), b.astype(F16)
    z = x * F16(0.5)
    fma = (y.astype(F64) * z.astype(F64) + y.astype(F64)).astype(F16)
    mixed = np.array([fused(float(p), float(q), float(r), F32) for p, q, r in zip(x, y, b, strict=True)], F32)
    whole = np.clip(np.trunc(x.astype(F64)), -(2**31), 2**31 - 1) + 0.0  # an integer is never -0
    dot = x.astype(F64) * y.astype(F64) + y.astype(F64) * z.astype(F64) + a.astype(F64)
    wanted = [x, x + y, x * y, x / y, x + y, y + z, x * y, fma, np.fmax(x, y), whole, mixed, dot]
    found = launch(arch, "halves", a, b, 12, F32)
    for number, (one, right) in enumerate(zip(found, wanted, strict=True)):
        if number == 11:
            subnormal = np.abs(z) < 2.0**-14
            one, right = one[~subnormal], right[~subnormal]
        same(one, right.astype(F32))


@ARCHS
@np.errstate(all="ignore")
def test_bfloat16_and_packed_floats(arch: str) -> None:
    a, b = numbers(F32, 12, False), numbers(F32, 13, False)
    rounded_a = torch.from_numpy(a).bfloat16().float().numpy()
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    low = np.array([fused(x, y, -y, F32) for x, y in pairs], F32)
    high = np.array([fused(y, 3.0, x, F32) for x, y in pairs], F32)
    wanted = [rounded_a, low, high, (a + b) * (b + F32(3)), (a - b) * F32(2), (b - F32(3)) * F32(2)]
    for found, right in zip(launch(arch, "pairs", a, b, 6, F32), wanted, strict=True):
        same(found, right)
