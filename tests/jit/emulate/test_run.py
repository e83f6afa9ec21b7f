"""The emulator runs a kernel by hand and one of clang's, on the memory of tensors and arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelpatch.jit.emulate import EmulationError, run
from tests.support.amdgcn import compiled, kernel, needs_clang

COUNTER = kernel(
    """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    s_mov_b32 s6, 0
    s_mov_b32 s7, 0
.Lwhile:
    s_cmp_lt_i32 s6, 32
    s_cbranch_scc0 .Ldone
    s_and_b32 s8, s6, 1
    s_cmp_eq_u32 s8, 0
    s_cbranch_scc0 .Lnext
    s_add_u32 s7, s7, s6
.Lnext:
    s_add_u32 s6, s6, 1
    s_branch .Lwhile
.Ldone:
    s_waitcnt lgkmcnt(0)
    s_store_dword s7, s[4:5], 0x0 glc
    s_waitcnt lgkmcnt(0)
""",
    "8",
)
VECTOR_ADD = """
#include <hip/hip_runtime.h>
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"""


@pytest.mark.parametrize("given", ["tensor", "address", "array"])
def test_the_counter(given: str) -> None:
    out = torch.full((4,), -1, dtype=torch.int32)
    value = {"tensor": out, "address": out.data_ptr(), "array": out.numpy()}[given]
    run(COUNTER, "k", [1], [64], [("global_buffer", value)], arch="gfx942")
    assert out.tolist() == [sum(range(0, 32, 2)), -1, -1, -1]


@needs_clang
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_vector_add_by_clang(arch: str) -> None:
    a, b, c = torch.randn(1000), torch.randn(1000), torch.full((1001,), 9.0)
    arguments = [("global_buffer", a), ("global_buffer", b.numpy()), ("global_buffer", c.data_ptr()), ("int", 1000)]
    run(compiled(arch, VECTOR_ADD), "add", [8], [128], arguments, arch=arch)
    assert torch.equal(c[:1000], a + b)
    assert c[1000] == 9


def test_an_address_of_no_tensor_is_refused() -> None:
    array = np.zeros(4, np.int32)
    with pytest.raises(EmulationError, match="in no live CPU tensor's memory: pass the tensor itself"):
        run(COUNTER, "k", [1], [64], [("global_buffer", array.ctypes.data)], arch="gfx942")
