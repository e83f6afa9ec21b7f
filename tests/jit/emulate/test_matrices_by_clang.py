"""Matrix instructions in kernels of clang's, against torch's products."""

from __future__ import annotations

import pytest
import torch

from accelpatch.jit.emulate import run
from tests.support.amdgcn import compiled, needs_clang

pytestmark = needs_clang
SOURCE = "tests/jit/emulate/hip/matrix.hip"
#: kernel -> rows, K of a step, dtypes of the inputs and of the result
PRODUCTS = {
    "bf16_32": (32, 8, torch.bfloat16, torch.float32),
    "f16_16": (16, 16, torch.float16, torch.float32),
    "f32_16": (16, 4, torch.float32, torch.float32),
    "f64_16": (16, 4, torch.float64, torch.float64),
    "i8_16": (16, 32, torch.int8, torch.int32),
}


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_torchs(name: str, arch: str) -> None:
    rows, step, dtype, result = PRODUCTS[name]
    step = 16 if (name, arch) == ("i8_16", "gfx90a") else step
    torch.manual_seed(0)
    a, b = (
        torch.randint(-128, 128, (rows, 3 * step)).to(dtype)
        if dtype is torch.int8
        else torch.randn(rows, 3 * step, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    c = torch.full((rows, rows), 99, dtype=result)
    arguments = [*(("global_buffer", one) for one in (a, b, c)), ("int", 3)]
    run(compiled(arch, SOURCE), name, [1], [64], arguments, arch=arch, strict=False)
    wanted = a.double() @ b.double().T
    if dtype is torch.int8:
        assert torch.equal(c.long(), wanted.long())
    else:
        torch.testing.assert_close(c.double(), wanted, rtol=1e-6, atol=1e-5 if result is torch.float32 else 1e-13)
