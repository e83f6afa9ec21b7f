"""What clang makes of shuffles, DPP, LDS, atomics and generic addresses, run in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from accelpatch.jit.emulate import run
from tests.support.amdgcn import ARCH_CASES, compiled, needs_clang

SOURCE = "tests/jit/emulate/hip/threads.hip"
pytestmark = [needs_clang, pytest.mark.parametrize("arch", ARCH_CASES)]
LANE = np.arange(64)


def launch(
    arch: str, name: str, grid: list[int], block: list[int], *given: object, shared: int = 0, seed: int = 0
) -> None:
    arguments = [("int", one) if isinstance(one, int) else ("global_buffer", one) for one in given]
    run(compiled(arch, SOURCE), name, grid, block, arguments, arch=arch, strict=False, shared=shared, seed=seed)


def test_shuffles(arch: str) -> None:
    v = np.random.default_rng(0).integers(-1000, 1000, 64).astype(np.int32)
    v[5] = 3
    out = np.zeros((64, 14), np.int32)
    launch(arch, "shuffles", [1], [64], v, out)
    odd = int((v & 1).sum())
    in_row = LANE & 15
    wanted = [
        v[LANE ^ 5],
        np.where(LANE >= 3, v[LANE - 3], v),
        np.where(LANE < 57, v[(LANE + 7) % 64], v),
        v[LANE * 11 & 63],
        np.full(64, odd),
        np.full(64, 3),
        np.where(in_row > 0, v[LANE - 1], -1),
        np.where(LANE // 16 % 2 == 1, v[(LANE & ~15) - 1], -1),
        v[LANE ^ 3],
        np.where(LANE // 4 % 2 == 0, v[LANE ^ 15], -7),
        v[LANE ^ 1],
        np.full(64, v[0] + v[17]),
        LANE,
        np.where((LANE % 3 == 1) & ((LANE ^ 3) % 3 == 1), v[LANE ^ 3] + v[1], 0),
    ]
    for column, right in enumerate(wanted):
        assert out[:, column].tolist() == right.tolist(), column


def test_a_sum_by_dpp(arch: str) -> None:
    v, out = np.arange(64, dtype=np.float32), np.zeros(1, np.float32)
    launch(arch, "wave_sum", [1], [64], v, out)
    assert out[0] == v.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sum_in_lds(arch: str, seed: int) -> None:
    v, out = np.random.default_rng(1).integers(-9, 9, (3, 700)).astype(np.float32), np.zeros(3, np.float32)
    launch(arch, "block_sum", [3], [256], v, out, 700, seed=seed)
    assert out.tolist() == v.sum(1).tolist()


def test_lds_atomics_and_dynamic_lds(arch: str) -> None:
    v, out = np.random.default_rng(2).integers(0, 256, 999).astype(np.uint8), np.zeros(64, np.int32)
    launch(arch, "histogram", [1], [192], v, out, 999, shared=256)
    counts = np.bincount(v & 63, minlength=64)
    assert out.tolist() == (counts * 2 + (counts[LANE ^ 1] & 1)).tolist()


def test_global_atomics(arch: str) -> None:
    v = np.random.default_rng(3).integers(-500, 500, 512).astype(np.int32)
    ints = np.array([10, -600, 600, 0, -1, 0, 7, 0, 1, 0, 3], np.int32)
    longs, floats = np.array([1, 2], np.int64), np.zeros(513, np.float32)
    launch(arch, "atomics", [2], [256], ints, longs, floats, v)
    product = 1
    for _ in range(512):
        product = (product * 3 + 1) % (1 << 32)
    wanted = [
        10 + v.sum(), v.max(), v.min(), np.bitwise_or.reduce(v), np.bitwise_and.reduce(v), np.bitwise_xor.reduce(v),
        7 - v.sum(), 512 % 11, np.int64(product).astype(np.int32), 512, 5,
    ]  # fmt: skip
    assert ints.tolist() == [int(one) for one in wanted]
    wide = v.astype(np.int64)
    squares = [(int(one) * int(one)) % (1 << 64) for one in wide]
    unsigned = [(int(one) % (1 << 64)) * int(one) % (1 << 64) for one in wide]
    assert longs.tolist() == [1 + int(wide.sum()), max(2, *unsigned)]
    assert squares == unsigned
    assert floats[0] == (v & 15).sum()
    assert (floats[1:] == 1).all()


def test_addresses_of_any_memory(arch: str) -> None:
    rng = np.random.default_rng(4)
    shorts, signed = rng.integers(-999, 999, 64).astype(np.int16), rng.integers(-128, 128, 64).astype(np.int8)
    threes, out = rng.integers(-99, 99, (64, 3)).astype(np.int32), np.zeros(256, np.int32)
    launch(arch, "addresses", [1], [64], shorts, signed, threes, out)
    local = shorts[LANE ^ 1].astype(np.int32) * 3
    x, y, z = threes.T
    assert out[:64].tolist() == (np.where(LANE % 3, local, signed) + x * y + z).tolist()
    assert out[64:128].tolist() == signed.tolist()
    assert out[128:144].view(np.uint8).tolist() == (x & 255).tolist()
    assert out[160:192].view(np.int16).tolist() == y.tolist()
    assert out[192:].tolist() == (z + LANE % 2).tolist()


def test_grids_and_blocks_of_three_axes(arch: str) -> None:
    out = np.full((2, 3, 2, 2, 3, 5), -1, np.int32)
    launch(arch, "grid", [2, 3, 2], [5, 3, 2], out)
    z, y, x, tz, ty, tx = np.indices(out.shape)
    assert np.array_equal(out, tx + 10 * ty + 100 * tz + 1000 * (x + 10 * y + 100 * z))
