"""Every operation: the float rule on its own cases, views, random shapes, NaN and infinity; and what torch asks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.spec import Case
from accelpatch.quant import int4, int8
from tests.support.experts import random_experts
from tests.support.parity import DTYPES, assert_parity, bits, name, strided, transposed

CPU = torch.device("cpu")
OPS = tuple(op for op in dispatch.TABLE if dispatch.kernel(op).registered)
CASES = [(op, case) for op in OPS for case in dispatch.kernel(op).cases()]
M = (0, 1, 2, 7, 129)
W8A8 = ("quantize_rows", "rmsnorm_rows", "gemm_w8a8", "gemm_fp8", "gated_fp8", "w8a8_linear", "w8a8_packed")
OF_INT8 = ("layernorm_q", "int8_attention", "gated_rows")
FORMS = (torch.int8, *FP8)
# integers, or 8-bit floats, go in
NO_GRADIENT = ("int8_embedding", "packed_embedding", "rotary_cos_sin", "gemm_w8a8", "gemm_fp8", "gated_fp8")
NO_GRADIENT += ("layernorm_q", "int8_attention")  # integers come out
PRODUCTS = ("gemv", "compact_linear", "int8_linear", "int4_linear", "tiled_int4_linear", "fp8_linear", "w8a8_linear")


def first_args(op: str, dtype: torch.dtype = torch.float32, index: int = 1) -> tuple[Any, ...]:
    return list(dispatch.kernel(op).cases())[index].make(torch.Generator().manual_seed(1), dtype, CPU)


def viewed(args: tuple[Any, ...], view: Any) -> tuple[Any, ...]:
    return tuple(view(value) if isinstance(value, Tensor) else value for value in args)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op, case", CASES, ids=[f"{op}-{case.id}" for op, case in CASES])
def test_float_rule(op: str, case: Case, dtype: torch.dtype) -> None:
    assert_parity(op, case.make(torch.Generator().manual_seed(7), dtype, CPU))


@pytest.mark.parametrize("view", [strided, transposed], ids=["strided-offset", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", OPS)
def test_views(op: str, dtype: torch.dtype, view: Any) -> None:
    args = first_args(op, dtype)
    plain = assert_parity(op, args)
    for one, other in zip(assert_parity(op, viewed(args, view)), plain, strict=True):
        assert one.shape == other.shape


def random_pack(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    m, n, k, group = rng.choice(M), rng.randint(1, 70), 32 * rng.randint(1, 9), rng.choice((32, None))
    w = torch.randn(n, k, generator=generator)
    if op == "packed_embedding":
        pack = Pack.pack(*int8.quantize(w, group_size=group)[:2], bits=8)
        return torch.randint(0, n, (m, 3), generator=generator), dtype, *pack.arguments()
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    if rng.random() < 0.5:
        return x, *Pack.pack(*int8.quantize(w, group_size=group)[:2], bits=8).arguments(), bias
    pack = Pack.pack(*int4.quantize(w, group_size=32, symmetric=rng.random() < 0.5), bits=4)
    return x, *pack.arguments(), None


def random_w8a8_pack(rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    m, n, k = rng.choice(M), rng.randint(1, 70), rng.randint(1, 300)
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    pack = W8A8Pack.pack(q, torch.rand(n, 1, generator=generator) / 100, rng.choice((None, 0.02)))
    return x, *pack.arguments(), rng.choice((None, bias))


def random_of_int8(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    m, k = rng.choice(M), rng.randint(1, 300)
    x = torch.randn(m, 2 * k if op == "gated_rows" else k, generator=generator).to(dtype)
    if op == "gated_rows":
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
    m, n, k = rng.choice(M), rng.randint(1, 70), group * rng.randint(1, 4) or 2 * rng.randint(1, 300)
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    q = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
    scale = (torch.rand(n, k // group if group else 1, generator=generator) / 100).half()
    zero = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.int32)
    offset = rng.choice((None, -8 * scale, zero))
    return x, *Tiles.pack(q, scale, offset), rng.choice((None, bias))


def random_args(op: str, rng: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    if op in (*W8A8, *OF_INT8):
        return random_w8a8(op, rng, generator, dtype)
    if op.startswith("packed_"):
        return random_pack(op, rng, generator, dtype)
    if op == "tiled_int4_linear":
        return random_tiles(rng, generator, dtype)
    m, n, k, groups = rng.choice(M), rng.randint(1, 70), rng.randint(1, 70), rng.choice((1, 2, 3))
    k = 2 * groups * k if op == "int4_linear" else groups * k
    x, scale, bias = (
        torch.randn(m, k, generator=generator).to(dtype),
        torch.rand(n, groups, generator=generator) / 100,
        torch.randn(n, generator=generator).to(dtype) if rng.random() < 0.5 else None,
    )
    q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    weight = torch.randn(k, generator=generator).to(dtype)
    plus_one = rng.random() < 0.5
    if op == "int8_linear":
        return x, q, scale, bias
    if op == "gemv":
        return x, torch.randn(n, k, generator=generator).to(dtype), bias
    if op == "compact_linear":
        return x, *CompactTiles.pack(torch.randn(n, k, generator=generator).bfloat16()), bias
    if op == "fp8_linear":
        return x, torch.randn(n, k, generator=generator).to(rng.choice(FP8)), scale[:, :1], bias
    if op == "int4_linear":
        minimum = torch.randn(n, groups, generator=generator) / 10
        zero = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.int32)
        return x, q[:, ::2].contiguous(), scale, rng.choice((None, minimum, zero)), bias
    if op == "int8_embedding":
        return torch.randint(0, n, (m, 3), generator=generator), q, scale, dtype
    if op == "rmsnorm":
        return x, weight, 1e-5, plus_one
    if op in ("add_rmsnorm", "rmsnorm_add"):
        return x, x.flip(0), weight, 1e-5, plus_one
    if op == "rotary_cos_sin":
        return torch.randint(0, 4096, (2, m), generator=generator), torch.rand(k, generator=generator), 1.5, dtype
    return x, x.flip(0), "silu"


@pytest.mark.parametrize("op", OPS)
def test_random_shapes(op: str) -> None:
    rng, generator = random.Random(11), torch.Generator().manual_seed(11)
    for round_ in range(50):
        made = random_experts if op.endswith("experts") else random_args
        assert_parity(op, made(op, rng, generator, DTYPES[round_ % 3]))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", PRODUCTS)
def test_leading_dimensions(op: str, dtype: torch.dtype) -> None:
    x, *rest = first_args(op, dtype, index=4)
    (flat,) = assert_parity(op, (x, *rest))
    (one,) = assert_parity(op, (x[0], *rest))
    (deep,) = assert_parity(op, (x[:6].reshape(2, 1, 3, -1), *rest))
    assert one.shape == flat[0].shape
    assert deep.shape == (2, 1, 3, flat.shape[1])


@pytest.mark.parametrize("op", ["int8_linear", "int4_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_half_products_are_rounded_once(op: str, dtype: torch.dtype) -> None:
    """Tighter than the float rule: on a CPU the weight is not rounded, and the sum is in float32."""
    args = first_args(op, dtype, index=6)
    exact = dispatch.kernel(op).reference(*dispatch.in_precision(args, torch.float64))
    error = (dispatch.kernel(op).op(*args).double() - exact).abs()
    assert bool((error <= 0.51 * parity.ulp(exact, dtype) + 1e-5).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", [*PRODUCTS, "rmsnorm", "add_rmsnorm", "rmsnorm_add", "gated_activation"])
def test_nan_and_infinity_come_through(op: str, dtype: torch.dtype, value: float) -> None:
    args = list(first_args(op, dtype, index=4 if "linear" in op else 1))
    args[0] = args[0].clone()
    args[0].view(-1)[3] = value
    output = assert_parity(op, args)[0]
    assert not bool(output.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    args = first_args(op, dtype)
    if not any(isinstance(one, Tensor) and one.dtype in FP8 for one in args):
        checks.append("test_schema")  # it changes the inputs' values, by operations that torch has not got for float8
    torch.library.opcheck(dispatch.kernel(op).op.custom, args, test_utils=checks)


@pytest.mark.parametrize("op", OPS)
def test_meta_and_fake_agree_with_real(op: str) -> None:
    for case in dispatch.kernel(op).cases():
        args = case.make(torch.Generator().manual_seed(0), torch.bfloat16, CPU)
        real = parity.as_tuple(dispatch.kernel(op).op(*args))
        ran = sum(dispatch.calls.values())
        on_meta = parity.as_tuple(dispatch.kernel(op).op(*viewed(args, lambda value: value.to("meta"))))
        with FakeTensorMode() as mode:
            fake = parity.as_tuple(dispatch.kernel(op).op(*viewed(args, mode.from_tensor)))
        assert sum(dispatch.calls.values()) == ran
        for expected, *others in zip(real, on_meta, fake, strict=True):
            for other in others:
                assert (other.shape, other.dtype, other.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.parametrize("op", OPS)
def test_compiles_into_one_graph(op: str) -> None:
    args = first_args(op)
    expected = parity.as_tuple(dispatch.kernel(op).op(*args))
    torch._dynamo.reset()
    run = dispatch.kernel(op).op
    compiled = torch.compile(lambda *values: run(*values), fullgraph=True, backend="aot_eager")
    chosen = dispatch.choose(op, dispatch.kernel(op).spec(*args), probe("cpu"))
    ran = dispatch.calls[op, chosen]
    for one, other in zip(parity.as_tuple(compiled(*args)), expected, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert dispatch.calls[op, chosen] == ran + 1


def test_one_compiled_graph_serves_every_m() -> None:
    _, *rest = first_args("int8_linear", index=4)
    torch._dynamo.reset()
    compiled = torch.compile(torch.ops.accelpatch.int8_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 7, 129):
        x = torch.randn(m, rest[0].shape[1])
        with torch._dynamo.config.patch(error_on_recompile=m > 2):
            assert torch.equal(compiled(x, *rest), torch.ops.accelpatch.int8_linear(x, *rest))


@pytest.mark.parametrize("op", [op for op in OPS if op not in NO_GRADIENT])
def test_backward_says_what_to_do(op: str) -> None:
    first, *rest = first_args(op)
    outputs = parity.as_tuple(dispatch.kernel(op).op(first.requires_grad_(), *rest))
    output = next(one for one in outputs if one.is_floating_point())
    with pytest.raises(KernelError, match="unpatch"):
        output.float().sum().backward()


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str) -> None:
    args = first_args(op)
    plain = parity.as_tuple(dispatch.kernel(op).op(*args))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = parity.as_tuple(dispatch.kernel(op).op(*args))
    for one, other in zip(inside, plain, strict=True):
        assert torch.equal(bits(one), bits(other))
