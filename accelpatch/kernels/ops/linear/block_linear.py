"""Linear layer and embedding over GGUF's blocks as they are stored (layouts/gguf_blocks.py has the formats):

    block_linear      y[..., N] = x[..., K] @ w[N, K]^T + bias[N]
    block_embedding   rows[..., K] = w[ids[...]]

blocks: uint8[N, row bytes]. A tied embedding and head share one copy. Values are computed in float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.layouts.gguf_blocks import FORMS, GgufBlocks, columns, row_bytes
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gradient
from accelpatch.kernels.ops.linear.gguf_values import dequantize_rows
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

TWO_LEVELS = ("Q4_K", "Q6_K")


def dense(dtype: torch.dtype, blocks: Tensor, form: str, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K], value by value in float32 or wider and rounded to `dtype`, and the bias."""
    wide, kind = torch.promote_types(dtype, torch.float32), FORMS[form]
    each = blocks.to(torch.int64).unflatten(1, (-1, kind.bytes))
    i = torch.arange(kind.values, device=blocks.device)
    floats = [_float16(each, place).to(wide) for place in kind.floats]
    code = _codes(each, form, i).to(wide)
    if form in ("Q8_0", "Q4_0"):
        values = floats[0] * (code - (8 if form == "Q4_0" else 0))
    elif form == "Q4_1":
        values = floats[0] * code + floats[1]
    elif form == "Q4_K":
        scale, minimum = _six_bits(each, i // 32)
        values = floats[0] * scale.to(wide) * code - floats[1] * minimum.to(wide)
    else:
        values = floats[0] * _signed(each[:, :, 192 + i // 16]).to(wide) * (code - 32)
    return values.flatten(1).to(dtype), None if bias is None else bias.to(dtype)


def _codes(each: Tensor, form: str, i: Tensor) -> Tensor:
    """The code of each value i of every block."""
    if form == "Q8_0":
        return _signed(each[:, :, 2 + i])
    if form == "Q6_K":
        half, place = i // 128, i % 128
        low = each[:, :, 64 * half + place % 64] >> (place // 64 * 4)
        high = each[:, :, 128 + 32 * half + place % 32] >> (place // 32 * 2)
        return low % 16 + high % 4 * 16
    byte = 16 + i // 64 * 32 + i % 32 if form == "Q4_K" else (2 if form == "Q4_0" else 4) + i % 16
    return each[:, :, byte] >> (i // (32 if form == "Q4_K" else 16) % 2 * 4) & 15


def _six_bits(each: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of group j of eight, 6 bits each."""
    s = each[:, :, 4:16]
    first, behind = s[:, :, j % 4], s[:, :, 4 + j % 4]
    late = s[:, :, 8 + j % 4]
    scale = torch.where(j < 4, first & 63, (late & 15) + (first >> 6) * 16)
    return scale, torch.where(j < 4, behind & 63, (late >> 4) + (behind >> 6) * 16)


def _float16(each: Tensor, place: int) -> Tensor:
    bits = each[:, :, place : place + 1] + 256 * each[:, :, place + 1 : place + 2]
    return bits.to(torch.uint16).view(torch.float16)


def _signed(byte: Tensor) -> Tensor:
    return byte - byte // 128 * 256


def reference(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, blocks, form, bias))


def embedding_reference(ids: Tensor, blocks: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Dequantise the rows in use to a table of their own, then torch's own embedding."""
    used, places = torch.unique(ids, return_inverse=True)
    return functional.embedding(places, dense(dtype, blocks[used], form)[0])


def row_blocks(blocks: Tensor, form: str, bias: Tensor | None = None) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""

    def part(dtype: torch.dtype, rows: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return dense(dtype, rows, form, beside)

    return common.float64_blocks(part, blocks, bias)


def _check(op: str, blocks: Tensor, form: str) -> int:
    """K of a weight. Raises KernelError for what are no blocks of this form."""
    require(
        blocks.dtype == torch.uint8 and blocks.dim() == 2,
        op,
        f"blocks are uint8 [N, row bytes], not {say(blocks)}",
    )
    require(blocks.shape[0] >= 1, op, "the weight is empty: N = 0")
    return columns(form, blocks.shape[1])


def spec(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    op, k = "block_linear", _check("block_linear", blocks, form)
    require(x.dim() >= 1 and x.dtype in FLOATS, op, f"x is float [..., K], not {say(x)}")
    require(x.shape[-1] == k, op, f"x has {x.shape[-1]} features, the weight {k}")
    common.check_beside(op, x, blocks.shape[0], bias, blocks=blocks)
    return of_shape(blocks.shape[0], k, x.dtype, form, m=x.numel() // k)


def of_shape(n: int, k: int, dtype: torch.dtype, form: str, *, m: int = 1, op: str = "block_linear") -> Spec:
    """The Spec of a weight of this size, for planning before there is one."""
    offset = "minimum" if len(FORMS[form].floats) > 1 else "none"
    return Spec(op, {"M": m, "N": n, "K": k}, dtype, torch.float16, FORMS[form].group, offset, {"blocks": form})


def embedding_spec(ids: Tensor, blocks: Tensor, form: str, dtype: torch.dtype) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    op, k = "block_embedding", _check("block_embedding", blocks, form)
    require(ids.dtype in (torch.int32, torch.int64), op, f"ids are int32 or int64, not {ids.dtype}")
    require(dtype in FLOATS, op, f"dtype is a float dtype, not {dtype}")
    require(ids.device == blocks.device, op, f"ids lie on {ids.device}, the table on {blocks.device}: move one")
    return of_shape(blocks.shape[0], k, dtype, form, m=ids.numel(), op=op)


def by_torch(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """The implementation `torch`: dequantises the weight in blocks of rows."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(blocks[start:stop], form, torch.promote_types(dtype, torch.float32))

    return common.by_row_blocks(x, blocks.shape[0], columns(form, blocks.shape[1]), rows, bias)


def embedding_by_torch(ids: Tensor, blocks: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The implementation `torch`: gathers and dequantises the rows."""
    wide = torch.promote_types(dtype, torch.float32)
    # index_select, as nn.Embedding does: an id out of range, a negative one too, raises IndexError
    rows = blocks.index_select(0, ids.reshape(-1))
    return dequantize_rows(rows, form, wide).to(dtype).view(*ids.shape, columns(form, blocks.shape[1]))


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if (form := spec.options.get("blocks", TWO_LEVELS[0])) not in TWO_LEVELS:
        return f"it takes {' and '.join(TWO_LEVELS)}, not {form}"
    return common.too_large(spec) or launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """The implementation `triton`: dequantises in registers, or for many rows into slices for torch's GEMM."""
    from accelpatch.kernels.triton.block_linear import block_linear as run

    return run(x, blocks, form, bias)


@operation("block_linear")
def block_linear(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias.

    x[..., K] float; blocks uint8[N, row bytes] of a form in FORMS; bias[N] float or None. y has x's dtype, contiguous.
    Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run("block_linear", spec, x.device, (x, blocks, form, bias))
    return y


block_linear.register_fake(common.rows_like(spec))


def _rows(weight: GgufBlocks) -> gradient.Rows:
    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return dequantize_rows(weight.w[start:stop], weight.form, wide).to(dtype)

    return rows


gradient.differentiate(block_linear, GgufBlocks, _rows)


@operation("block_embedding")
def block_embedding(ids: Tensor, blocks: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """rows[..., K] of the table in `dtype`; ids[...] int32 or int64 in 0..N-1, else IndexError.

    blocks uint8[N, row bytes] of a form in FORMS. Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run("block_embedding", embedding_spec, blocks.device, (ids, blocks, form, dtype))
    return y


@block_embedding.register_fake
def _fake_embedding(ids: Tensor, blocks: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    made = embedding_spec(ids, blocks, form, dtype)
    return blocks.new_empty((*ids.shape, made.sizes["K"]), dtype=dtype)


def random_blocks(generator: torch.Generator, n: int, k: int, form: str) -> Tensor:
    """Random codes and scales of a weight[n, k] whose float16 values are near 1 / sqrt(k), for parity checks."""
    kind = FORMS[form]
    blocks = torch.randint(0, 256, (n, row_bytes(form, k)), generator=generator, dtype=torch.uint8)
    each = blocks.view(n, -1, kind.bytes)
    levels = {"Q8_0": 127, "Q4_0": 8, "Q4_1": 8, "Q4_K": 8 * 32, "Q6_K": 32 * 64}[form]
    for place in kind.floats:
        d = (torch.rand(n, each.shape[1], 1, generator=generator) + 0.5) / (levels * k**0.5)
        each[:, :, place : place + 2] = d.half().view(torch.uint8)
    return blocks


SIZES = ((1, 64, 256, False), (2, 1, 512, True), (7, 33, 768, False), (0, 7, 256, True), (129, 65, 256, True),
         (1, 7, 11008, False))  # fmt: skip


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, each form."""

    def case(m: int, n: int, k: int, bias: bool, form: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x, _, b = common.operands(generator, dtype, device, m, n, k, 1, bias)
            return x, random_blocks(generator, n, k, form).to(device), form, b

        return Case(f"m{m}-n{n}-k{k}-{form}{'-bias' if bias else ''}", make)

    others = [form for form in FORMS if form not in TWO_LEVELS]
    return [case(*size, form=form) for size in SIZES for form in TWO_LEVELS] + [
        case(3, 10, 96, True, form) for form in others
    ]


def embedding_cases() -> list[Case]:
    """Cases for parity checks: each form."""

    def case(shape: tuple[int, ...], n: int, k: int, form: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            ids = torch.randint(0, n, shape, generator=generator).to(device)
            return ids, random_blocks(generator, n, k, form).to(device), form, dtype

        return Case(f"ids{'x'.join(map(str, shape))}-n{n}-k{k}-{form}", make)

    shapes = ((1, 1), (2, 7), (0,), (129,), (3,))
    return [case(shape, 65, 256, form) for shape, form in zip(shapes, FORMS, strict=True)]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
EMBEDDING = {"torch": Implementation(embedding_by_torch, dispatch.anywhere)}
KERNELS = {
    "block_linear": Kernel(block_linear, reference, spec, IMPLEMENTATIONS, cases, row_blocks),
    "block_embedding": Kernel(block_embedding, embedding_reference, embedding_spec, EMBEDDING, embedding_cases),
}
