"""y = W x in bfloat16, for any K: a wavefront a row, loads as wide as the rows allow, the tail of K masked off.

python examples/jit/gemv.py            on an AMD GPU
python examples/jit/gemv.py emulate    anywhere
"""

import math
import sys

import torch

import accelpatch

ROWS = 4  # of a workgroup, each a wavefront's
STEPS = 4  # loads of each operand that a wavefront has under way


def sum_of_lanes(J, value):
    """The sum of a vector register over the wavefront, in lane 63."""
    for step in ("row_shr:1", "row_shr:2", "row_shr:4", "row_shr:8"):
        J.v_add_f32(value, value, value, mod=f"{step} row_mask:0xf bank_mask:0xf bound_ctrl:0")
    J.v_add_f32(value, value, value, mod="row_bcast:15 row_mask:0xa bank_mask:0xf")
    J.v_add_f32(value, value, value, mod="row_bcast:31 row_mask:0xc bank_mask:0xf")


def load(J, wide):
    """The instruction that loads so many bfloat16 elements."""
    return {1: J.global_load_ushort, 2: J.global_load_dword, 4: J.global_load_dwordx2, 8: J.global_load_dwordx4}[wide]


@accelpatch.jit(threads=64 * ROWS, waits="auto")
def gemv(J, K, w: "bf16*", x: "bf16*", y: "bf16*", n: "int"):
    wide = math.gcd(K, 8)  # elements of a load: all rows must begin where such a load may
    row = J.gpr(J.blockIdx.x * ROWS + J.wave_id)
    with J.If(row < n):
        w_row = J.gpr("su64", w + row.to("u64") * (K * 2))
        total = J.gpr(2, "vf32", 0.0)
        k = J.gpr(J.lane_id * wide)
        for steps in (STEPS, 1):  # so many loads at once; then what is left of K, lane by lane
            ahead = (steps - 1) * 64 * wide
            if ahead >= K:
                continue
            with J.While(k < K - ahead):
                add_products(J, total, k, wide, steps, w_row, x)
                k[0] = k + steps * 64 * wide
        total[0] = total[0] + total[1]
        sum_of_lanes(J, total[0])
        with J.If(J.lane_id == 63):
            J.global_store_short(J.gpr("vu32", row * 2), total[0].to("bf16"), y)


def add_products(J, total, k, wide, steps, w_row, x):
    """Add w[k] x[k] of a lane's elements to two sums, those with an even k and the others."""
    words, offset = max(1, wide // 2), J.gpr(k * 2)
    a, b = J.gpr(steps, words, "vu32"), J.gpr(steps, words, "vu32")
    for step in range(steps):
        load(J, wide)(a[step], offset, w_row, mod=f"offset:{step * 128 * wide}")
        load(J, wide)(b[step], offset, x, mod=f"offset:{step * 128 * wide}")
    for one, other in ((a[step, i], b[step, i]) for step in range(steps) for i in range(words)):
        # A bfloat16 is the upper half of an f32: two of them lie in a word, the first one in its lower half.
        p, q = J.gpr(2, "vf32"), J.gpr(2, "vf32")
        for pair, word in ((p, one), (q, other)):
            pair.view("u32")[0] = word << 16
            pair.view("u32")[1] = word & 0xFFFF0000 if wide > 1 else 0
        total[:] = p * q + total


def multiply(w, x, device=None, arch=None):
    """w[N, K] times x[K], both in bfloat16."""
    y = torch.empty(w.shape[0], dtype=torch.bfloat16, device=w.device)
    gemv([-(-w.shape[0] // ROWS)], [64 * ROWS], w.shape[1], w, x, y, w.shape[0], device=device, arch=arch)
    return y


def main(device=None):
    torch.manual_seed(0)
    for rows, depth in ((64, 256), (5, 1000), (3, 77)):
        w = torch.randn(rows, depth, device="cpu" if device else "cuda").bfloat16()
        x = torch.randn(depth, device=w.device).bfloat16()
        expected = (w.double() @ x.double()).float()
        error = (multiply(w, x, device).float() - expected).abs().max() / expected.abs().max()
        assert error < 2**-8, error


if __name__ == "__main__":
    main(*sys.argv[1:])
