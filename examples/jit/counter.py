"""The smallest kernel: a loop and a condition of scalars. It sums the even numbers below N.

python examples/jit/counter.py            on an AMD GPU
python examples/jit/counter.py emulate    anywhere
"""

import sys

import torch

import accelpatch


@accelpatch.jit()
def kernel(J, N, s_pout: "int*"):
    s_i = J.gpr("si32")
    s_cnt = J.gpr("si32")
    s_i[0] = 0
    s_cnt[0] = 0
    with J.While(s_i[0] < N) as loop:  # noqa: F841
        with J.If((s_i[0] & 1) == 0):
            s_cnt[0] = s_cnt + s_i
        s_i[0] = s_i[0] + 1

    J.s_store_dword(s_cnt, s_pout, 0, mod="glc")
    J.s_waitcnt(mod=f"lgkmcnt({0})")


def main(device=None):
    OUT = torch.arange(0, 32, dtype=torch.int, device="cpu" if device else "cuda")
    kernel([1], [64], 32, OUT.data_ptr(), device=device)
    assert OUT[0] == sum([i if (i & 1) == 0 else 0 for i in range(32)]), f"{OUT=}"


if __name__ == "__main__":
    main(*sys.argv[1:])
