"""Arguments of operations in random shapes: odd sizes, every kind of what stands beside a weight, or nothing."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.codebooks import scale_dtype
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.int3_tiles import Int3Tiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import FP8, Int3Rows
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.ops.attention.cases import Call, made
from accelpatch.quant import int4, int8
from tests.support.gguf_blocks import random_args_of_blocks
from tests.support.packs import FOREIGN, operands, size_for

M = (0, 1, 2, 7, 129)
W8A8 = (
    "quantize_rows",
    "rmsnorm_rows",
    "layernorm_rows",
    "gemm_w8a8",
    "gemm_fp8",
    "gated_fp8",
    "w8a8_linear",
    "w8a8_packed",
)
OF_INT8 = ("layernorm_q", "int8_attention", "gated_rows", "activated_rows")
FORMS = (torch.int8, *FP8)


def random_pack(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    m, n, k, group = rng.choice(M), rng.randint(1, 70), 32 * rng.randint(1, 9), rng.choice((32, None))
    w = torch.randn(n, k, generator=generator)
    if op == "packed_embedding":
        pack = Pack.of(int8.quantize(w, group_size=group))
        return torch.randint(0, n, (m, 3), generator=generator), dtype, *pack.arguments()
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    if rng.random() < 0.4:
        return foreign(rng.choice(FOREIGN), (m, n, k), dtype, rng.randint(0, 99))
    if rng.random() < 0.5:
        return x, *Pack.of(int8.quantize(w, group_size=group)).arguments(), bias
    pack = Pack.of(int4.quantize(w, group_size=32, symmetric=rng.random() < 0.5))
    return x, *pack.arguments(), None


def foreign(kind: str, size: tuple[int, int, int], dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    return operands(kind, *size_for(kind, *size), dtype, seed)[1]


def random_w8a8_pack(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    m, n, k = rng.choice(M), rng.randint(1, 70), rng.randint(1, 300)
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    pack = W8A8Pack.pack(q, torch.rand(n, 1, generator=generator) / 100, rng.choice((None, 0.02)))
    return x, *pack.arguments(), rng.choice((None, bias))


def random_of_int8(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    m, k = rng.choice(M), rng.randint(1, 300)
    x = torch.randn(m, 2 * k if op == "gated_rows" else k, generator=generator).to(dtype)
    if op in ("gated_rows", "activated_rows"):
        return x, rng.choice(("silu", "gelu")), rng.choice((None, torch.tensor([0.03]))), rng.choice(FORMS)
    if op == "layernorm_q":
        return x, 40 * torch.randn(k, generator=generator), 9 * torch.randn(k, generator=generator), 1e-5
    sizes, later = (rng.randint(1, 2), rng.randint(1, 3)), rng.randint(1, 40)
    shapes = ((*sizes, min(m, 20), 24), (*sizes, min(m, 20) + later, 24))
    q, k_, v = (torch.randint(-127, 128, shapes[at > 0], generator=generator).to(torch.int8) for at in range(3))
    mask = rng.choice((None, torch.rand(sizes[0], 1, q.shape[2], v.shape[2], generator=generator) > 0.4))
    return q, k_, v, torch.tensor([1e-4, 1 / 127]), mask, rng.random() < 0.5


def random_w8a8(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    """Integers or the rows that become some; each vector and matrix beside them there or not."""
    if op in OF_INT8:
        return random_of_int8(op, rng, generator, dtype)
    if op == "w8a8_packed":
        return random_w8a8_pack(rng, generator, dtype)
    m, n, k = rng.choice(M), rng.randint(1, 70), rng.randint(1, 300)

    def maybe(*shape: int) -> Any:
        return rng.choice((None, torch.rand(*shape, generator=generator) / 9))

    x, given = torch.randn(m, k, generator=generator).to(dtype), rng.choice((None, torch.tensor([0.03])))
    form = rng.choice(FORMS)
    if op == "quantize_rows":
        return x, given, form
    if op == "layernorm_rows":
        weight, bias = torch.randn(2, k, generator=generator).to(dtype)
        return x, rng.choice((None, x.flip(0))), weight, rng.choice((None, bias)), 1e-5, given, form, k % 2 == 0
    if op == "rmsnorm_rows":
        weight = torch.randn(k, generator=generator).to(dtype)
        return x, rng.choice((None, x.flip(0))), weight, 1e-5, k % 2 == 0, given, form
    a, b = (torch.randint(-128, 128, (size, k), generator=generator, dtype=torch.int8) for size in (m, n))
    bias = None if rng.random() < 0.5 else torch.randn(n, generator=generator).to(dtype)
    if op == "w8a8_linear":
        static = given if form == torch.int8 else None
        return x, b.to(form), torch.rand(n, 1, generator=generator) / 100, static, bias
    if op.endswith("_fp8"):
        gate, form = op == "gated_fp8", rng.choice(FP8)
        b = b[:-1] if n % 2 and n > 1 and gate else torch.cat([b, b]) if gate and n == 1 else b
        row, column = torch.rand(m, generator=generator) / 99, torch.rand(len(b), generator=generator) / 99
        held = (a.to(form), b.to(form), row, column, None if bias is None else bias[:1].expand(len(b)).contiguous())
        return (*held, "silu", dtype) if gate else (*held, dtype)
    correction = rng.choice((None, b.sum(-1, dtype=torch.int32)))
    d, residual = (
        rng.choice((None, torch.randn(n, generator=generator), torch.randn(m, n, generator=generator))),
        maybe(m, n),
    )
    activation = rng.choice(("none", "relu", "silu", "gelu", "gelu_tanh"))
    return a, b, 1 / k, maybe(m), maybe(n), d, 0.5, correction, activation, residual, rng.choice((torch.int8, dtype))


def random_tiles(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    """Groups of every size that tiles take, whole rows of odd length among them, and every kind of offset."""
    group = rng.choice((32, 64, 128, 256, 0))
    codebook = rng.choice(("nf4", "fp4", "e2m1") if group == 32 else ("nf4", "fp4"))
    m, n, k = rng.choice(M), rng.randint(1, 70), group * rng.randint(1, 4) or 2 * rng.randint(1, 300)
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    q = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
    scale = (torch.rand(n, k // group if group else 1, generator=generator) / 100).half()
    if group in (32, 64) and k > group and rng.random() < 0.5:
        return x, *Tiles.pack(q, scale.to(scale_dtype(codebook)), codes=codebook), rng.choice((None, bias))
    zero = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.int32)
    offset = rng.choice((None, -8 * scale, zero))
    return x, *Tiles.pack(q, scale, offset), rng.choice((None, bias))


def random_int3_tiles(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    """The same of 3 bits."""
    group = rng.choice((32, 64, 128, 256, 0))
    m, n, k = rng.choice(M), rng.randint(1, 70), group * rng.randint(1, 4) or 8 * rng.randint(1, 75)
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    q = torch.randint(-128, 128, (n, k // 8 * 3), generator=generator, dtype=torch.int8)
    scale = (torch.rand(n, k // group if group else 1, generator=generator) / 100).half()
    zero = torch.randint(0, 8, scale.shape, generator=generator, dtype=torch.int8)
    return x, *Int3Tiles.of(Int3Rows(q, scale, rng.choice((None, -4 * scale, zero)))), rng.choice((None, bias))


def random_norm(op: str, x: Tensor, weight: Tensor, rng: random.Random, generator: torch.Generator) -> tuple[Any, ...]:
    """An RMSNorm's arguments, with what its operation has beside it."""
    plus_one = rng.random() < 0.5
    if op == "add_layernorm":
        return x, x.flip(0), weight, rng.choice((None, weight.flip(0))), 1e-5
    if op == "rmsnorm":
        return x, weight, 1e-5, plus_one
    if op == "reorder":
        order = torch.randperm(x.shape[1], generator=generator).to(torch.int32)
        return x, order, rng.choice((None, weight)), 1e-5, plus_one
    return x, x.flip(0), weight, 1e-5, plus_one


def random_attention(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    """A call of flash_attention: every kind of mask beside the others."""
    length, kv_heads, causal = rng.choice((0, 1, 2, 7, 40)), rng.randint(1, 2), rng.random() < 0.6
    hidden = rng.choice(("", "", "left", "right", "none", "packed")) if length else ""
    call = Call(
        rng.randint(1, 2), kv_heads * rng.randint(1, 3), kv_heads, length, length + rng.randint(1, 30),
        rng.randint(8, 70), causal, rng.choice((0, 5)) if causal else 0, rng.choice((0.0, 2.0)),
        hidden, rng.choice(("", "", "bool", "float")), rng.random() < 0.3,
    )  # fmt: skip
    return made(call, generator, dtype, torch.device("cpu"))


#: operation -> what makes all of its arguments
OF_ITS_OWN = {
    "flash_attention": random_attention, "tiled_int4_linear": random_tiles, "tiled_int3_linear": random_int3_tiles,
}  # fmt: skip


def random_args(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    if op in (*W8A8, *OF_INT8):
        return random_w8a8(op, rng, generator, dtype)
    if op.startswith(("packed_", "block_")):
        return (random_pack if op.startswith("packed_") else random_args_of_blocks)(op, rng, generator, dtype)
    if op in OF_ITS_OWN:
        return OF_ITS_OWN[op](rng, generator, dtype)
    m, n, k, groups = rng.choice(M), rng.randint(1, 70), rng.randint(1, 70), rng.choice((1, 2, 3))
    k = {"int4_linear": 2, "int3_linear": 8}.get(op, 1) * groups * k
    x, scale, bias = (
        torch.randn(m, k, generator=generator).to(dtype),
        torch.rand(n, groups, generator=generator) / 100,
        torch.randn(n, generator=generator).to(dtype) if rng.random() < 0.5 else None,
    )
    q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    weight = torch.randn(k, generator=generator).to(dtype)
    if op == "int8_linear":
        return x, q, scale, bias
    if op == "float_linear":
        return x, torch.randn(n, k, generator=generator).to(dtype), bias
    if op == "compact_linear":
        return x, *CompactTiles.pack(torch.randn(n, k, generator=generator).bfloat16()), bias
    if op == "fp8_linear":
        return x, torch.randn(n, k, generator=generator).to(rng.choice(FP8)), scale[:, :1], bias
    if op == "int4_linear":
        minimum = torch.randn(n, groups, generator=generator) / 10
        zero = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.int32)
        codes = rng.choice(("", "nf4", "fp4"))
        return x, q[:, ::2].contiguous(), scale, None if codes else rng.choice((None, minimum, zero)), codes, bias
    if op == "int3_linear":
        return x, q[:, : k // 8 * 3].contiguous(), scale, rng.choice((None, -4 * scale, scale.mul(799).char())), bias
    if op == "int8_embedding":
        return torch.randint(0, n, (m, 3), generator=generator), q, scale, dtype
    if op in ("rmsnorm", "add_rmsnorm", "rmsnorm_add", "add_layernorm", "reorder"):
        return random_norm(op, x, weight, rng, generator)
    if op == "rotary_cos_sin":
        return torch.randint(0, 4096, (2, m), generator=generator), torch.rand(k, generator=generator), 1.5, dtype
    return x, x.flip(0), "silu"
