"""Float expressions and conversions in the emulator against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.jit_kernels import ARCHS, LANES, elements


def operands() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = (random.normal(size=LANES) * 10).astype(np.float32)
    y = random.normal(size=LANES).astype(np.float32)
    x[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-3]
    y[7], x[8] = 1.0, y[8]
    return x, y


def bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


def expressions(J: Any, a: Any, b: Any) -> list[Any]:
    wide, half = a.to("f64"), a.to("f16")
    return [
        a + b, a - b, a * b, a * b + 1.5, a - 3.0, 3.0 - a, a / 4.0, -a, abs(a), J.min(a, b), J.max(a, b),
        half.to("f32"), a.to("bf16").to("f32"), wide.to("f32"), (wide * b.to("f64") + 0.1).to("f32"),
        (wide - b.to("f64")).to("f32"), (half - b.to("f16") * 2.0).to("f32"), (-wide).to("f32"),
        J.select(a < b, 1.0, a), J.select(~(a < b), 1.0, 0.0), J.select(~(a != a), a, b), J.select(a >= 2, a, 2.0),
        J.select((a < b) & (a > 0.0) | (b == 1.0), 3.0, 4.0), J.gpr("sf32", 2.5) * a + b, a.to("i32").to("f32"),
        a.view("u32").to("f32"), J.gpr("vu16", 7).to("f32"),
    ]  # fmt: skip


def plain(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    f, wide, half = np.float32, a.astype(np.float64), a.astype(np.float16)
    return [
        a + b, a - b, a * b, wide * b + 1.5, a - f(3), f(3) - a, a / f(4), -a, abs(a), np.fmin(a, b), np.fmax(a, b),
        half, bfloat16(a), a, wide * b + 0.1, wide - b, half - b.astype(np.float16) * np.float16(2), -a,
        np.where(a < b, 1, a), np.where(~(a < b), 1, 0), np.where(np.isnan(a), b, a), np.where(a >= 2, a, 2),
        np.where((a < b) & (a > 0) | (b == 1), 3, 4), 2.5 * wide + b, _truncated(a), a.view(np.uint32),
        np.full(LANES, 7),
    ]  # fmt: skip


def _truncated(a: np.ndarray) -> np.ndarray:
    """NaN becomes 0, and what is too large the largest integer."""
    return np.where(np.isnan(a), 0, np.clip(np.trunc(a.astype(np.float64)), -(2**31), 2**31 - 1))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_exact(arch: str) -> None:
    """Products with a sum are rounded once; everything else as numpy rounds it."""
    x, y = operands()
    with np.errstate(all="ignore"):
        expected = [one.astype(np.float32) for one in plain(x, y)]
    made = elements(expressions, x, y, len(expected), "vf32", ("vf32", "vf32"), arch)
    for number, (row, right) in enumerate(zip(made, expected, strict=True)):
        np.testing.assert_array_equal(row, right, err_msg=f"expression {number}")


def test_division_is_by_the_reciprocal() -> None:
    x, y = operands()
    made = elements(lambda J, a, b: [a / b, 1.0 / b, a / 3.0], x, y, 3, "vf32", ("vf32", "vf32"), "gfx942")
    for row, right in zip(made, (x / y, 1 / y, x / np.float32(3)), strict=True):
        np.testing.assert_allclose(row, right, rtol=2.5 * 2**-23)


def test_pairs_of_halves() -> None:
    """f16x2: both lanes of a register at once."""
    random = np.random.default_rng(1)
    x, y = (random.normal(size=2 * LANES).astype(np.float16) for _ in range(2))

    def compute(J: Any, a: Any, b: Any) -> list[Any]:
        a, b = a.view("f16x2"), b.view("f16x2")
        rows = [a + b, a * b, -a, abs(a), J.max(a, b), a * 2.0, a - b]
        return [J.gpr("vf16x2", one).view("u32") for one in rows]

    made = elements(compute, x.view(np.uint32), y.view(np.uint32), 7, "vu32", ("vu32", "vu32"), "gfx942")
    for row, right in zip(made, (x + y, x * y, -x, abs(x), np.fmax(x, y), x * 2, x - y), strict=True):
        np.testing.assert_array_equal(row.view(np.float16), right.astype(np.float16))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx950"])
def test_doubles_by_constants(arch: str) -> None:
    x = np.random.default_rng(0).normal(size=LANES)

    def compute(J: Any, a: Any, b: Any) -> list[Any]:
        return [a + 0.5, a * 0.1, a + b, J.max(a, b), abs(a), J.select(a < 0.3, a, 0.0), -a + 1.0]

    made = elements(compute, x, -x, 7, "vf64", ("vf64", "vf64"), arch)
    rows = (x + 0.5, x * 0.1, x * 0, abs(x), abs(x), np.where(x < 0.3, x, 0), 1 - x)
    for row, right in zip(made, rows, strict=True):
        np.testing.assert_array_equal(row, right)
