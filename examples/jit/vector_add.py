"""out = a + b: one work item an element, and the work items past the end masked off.

python examples/jit/vector_add.py            on an AMD GPU
python examples/jit/vector_add.py emulate    anywhere
"""

import sys

import torch

import accelpatch

THREADS = 256


@accelpatch.jit(threads=THREADS)
def vector_add(J, a: "float*", b: "float*", out: "float*", n: "int"):
    i = J.gpr(J.blockIdx.x * THREADS + J.threadIdx.x)
    with J.If(i < n):
        offset = J.gpr(i * 4)
        x, y = J.gpr("vf32"), J.gpr("vf32")
        J.global_load_dword(x, offset, a)
        J.global_load_dword(y, offset, b)
        J.s_waitcnt(mod="vmcnt(0)")
        J.global_store_dword(offset, x + y, out)


def add(a, b, device=None):
    """a + b of two float32 tensors of one size."""
    out = torch.empty_like(a)
    groups = -(-a.numel() // THREADS)
    vector_add([groups], [THREADS], a, b, out, a.numel(), device=device)
    return out


def main(device=None):
    a, b = torch.randn(2, 1000, device="cpu" if device else "cuda")
    assert torch.equal(add(a, b, device), a + b)


if __name__ == "__main__":
    main(*sys.argv[1:])
