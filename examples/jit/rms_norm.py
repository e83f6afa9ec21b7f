"""RMSNorm of rows of bfloat16: a workgroup a row, summed across lanes by DPP and across wavefronts through LDS.

python examples/jit/rms_norm.py            on an AMD GPU
python examples/jit/rms_norm.py emulate    anywhere
"""

import sys

import torch

import accelpatch

THREADS = 256


def sum_of_lanes(J, value):
    """The sum of a vector register over the wavefront, in lane 63; each step adds the lanes that are so far away."""
    for step in ("row_shr:1", "row_shr:2", "row_shr:4", "row_shr:8"):
        J.v_add_f32(value, value, value, mod=f"{step} row_mask:0xf bank_mask:0xf bound_ctrl:0")
    J.v_add_f32(value, value, value, mod="row_bcast:15 row_mask:0xa bank_mask:0xf")
    J.v_add_f32(value, value, value, mod="row_bcast:31 row_mask:0xc bank_mask:0xf")


@accelpatch.jit(threads=THREADS)
def rms_norm(J, K, eps, x: "bf16*", weight: "bf16*", out: "bf16*"):
    start = J.gpr("su64", J.blockIdx.x.to("u64") * (K * 2))
    row, out_row = J.gpr("su64", x + start), J.gpr("su64", out + start)
    squares = J.gpr("vf32", 0.0)
    element = J.gpr("vbf16")
    with J.For(J.threadIdx.x, K, THREADS) as i:
        J.global_load_ushort(element, i * 2, row)
        J.s_waitcnt(mod="vmcnt(0)")
        value = J.gpr(element.to("f32"))
        squares[0] = value * value + squares
    sum_of_lanes(J, squares)

    # Lane 63 of each wavefront has its sum: all of them meet in LDS.
    waves = THREADS // 64
    sums = J.alloc_lds(4 * waves)
    with J.If(J.lane_id == 63):
        J.ds_write_b32(J.gpr("vu32", sums + J.wave_id * 4), squares)
    J.s_waitcnt(mod="lgkmcnt(0)")
    J.s_barrier()
    parts = J.gpr(waves, "vf32")
    J.ds_read_b128(parts, J.gpr("vu32", sums))
    J.s_waitcnt(mod="lgkmcnt(0)")
    scale = J.gpr("vf32", ((parts[0] + parts[1]) + (parts[2] + parts[3])) * (1.0 / K) + eps)
    J.v_rsq_f32(scale, scale)

    factor = J.gpr("vbf16")
    with J.For(J.threadIdx.x, K, THREADS) as i:
        J.global_load_ushort(element, i * 2, row)
        J.global_load_ushort(factor, i * 2, weight)
        J.s_waitcnt(mod="vmcnt(0)")
        # The norm is rounded to bfloat16 before the weight, as Llama's is.
        normed = J.gpr((element.to("f32") * scale).to("bf16"))
        J.global_store_short(i * 2, (normed.to("f32") * factor.to("f32")).to("bf16"), out_row)


def norm(x, weight, eps=1e-6, device=None, arch=None):
    """x[rows, K] and weight[K] in bfloat16."""
    out = torch.empty_like(x)
    rms_norm([x.shape[0]], [THREADS], x.shape[1], eps, x, weight, out, device=device, arch=arch)
    return out


def reference(x, weight, eps=1e-6):
    value = x.float()
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return normed.bfloat16() * weight


def main(device=None):
    torch.manual_seed(0)
    x = torch.randn(3, 300, device="cpu" if device else "cuda").bfloat16()
    weight = torch.rand(300, device=x.device).bfloat16()
    torch.testing.assert_close(norm(x, weight, device=device), reference(x, weight), rtol=2**-7, atol=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
