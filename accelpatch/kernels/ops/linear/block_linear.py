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
from accelpatch.kernels.cpu import stored
from accelpatch.kernels.layouts.gguf_blocks import FORMS, GgufBlocks, columns, row_bytes
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.linear import common, gguf_elements, gradient
from accelpatch.kernels.ops.linear.gguf_values import dequantize_rows
from accelpatch.kernels.spec import Blocks, Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

HELD_OTHERWISE = ("Q8_0", "Q4_0", "Q4_1")  # as int8 and int4: of these, embeddings alone are blocks
BY_TRITON = tuple(form for form in FORMS if form not in HELD_OTHERWISE)


def dense(dtype: torch.dtype, blocks: Tensor, form: str, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The weight[N, K], value by value in float32 or wider and rounded to `dtype`, and the bias."""
    return gguf_elements.dense(dtype, blocks, form), None if bias is None else bias.to(dtype)


def reference(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """Dequantise the whole weight to x's dtype, then torch's own linear layer."""
    return functional.linear(x, *dense(x.dtype, blocks, form, bias))


def embedding_reference(ids: Tensor, blocks: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Dequantise the rows that the ids select, then torch's own embedding over this smaller table."""
    used, places = torch.unique(ids, return_inverse=True)
    return functional.embedding(places, dense(dtype, blocks[used], form)[0])


def row_blocks(blocks: Tensor, form: str, bias: Tensor | None = None) -> Blocks:
    """The weight and the bias in float64, in blocks of rows."""

    def part(dtype: torch.dtype, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return dense(dtype, rows, form, bias)

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
    common.check_bias(op, x, blocks.shape[0], bias, blocks=blocks)
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
    if (form := spec.options.get("blocks", BY_TRITON[0])) not in BY_TRITON:
        return f"it takes {', '.join(BY_TRITON)}, not {form}"
    return common.too_large(spec) or launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """The implementation `triton`: dequantises in registers, or for many rows into slices for torch's GEMM."""
    from accelpatch.kernels.triton.block_linear import block_linear as run

    return run(x, blocks, form, bias)


def by_cpu(x: Tensor, blocks: Tensor, form: str, bias: Tensor | None = None) -> Tensor:
    """The implementation `cpu_stored`: the native library makes a block's values float in a core's cache."""
    return stored.linear(x, blocks, form, None, bias)


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


#: the size of a form's usual products of codes and scales
LEVELS = {
    "Q8_0": 127, "Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q2_K": 2 * 8, "Q3_K": 4 * 32, "Q4_K": 8 * 32,
    "Q5_K": 16 * 32, "Q6_K": 32 * 64, "IQ4_NL": 127, "IQ4_XS": 127 * 32,
}  # fmt: skip


def random_blocks(generator: torch.Generator, n: int, k: int, form: str) -> Tensor:
    """Random codes and scales of a weight[n, k] whose float16 values are near 1 / sqrt(k), for parity checks."""
    kind = FORMS[form]
    blocks = torch.randint(0, 256, (n, row_bytes(form, k)), generator=generator, dtype=torch.uint8)
    each = blocks.view(n, -1, kind.bytes)
    levels = LEVELS[form]
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

    short = [form for form, kind in FORMS.items() if kind.values == 32]
    long = [form for form in FORMS if form not in short]
    return [case(*size, form=form) for form in long for size in SIZES] + [case(3, 10, 96, True, form) for form in short]


def embedding_cases() -> list[Case]:
    """Cases for parity checks: each form."""

    def case(shape: tuple[int, ...], n: int, k: int, form: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            ids = torch.randint(0, n, shape, generator=generator).to(device)
            return ids, random_blocks(generator, n, k, form).to(device), form, dtype

        return Case(f"ids{'x'.join(map(str, shape))}-n{n}-k{k}-{form}", make)

    shapes = ((1, 1), (2, 7), (0,), (129,), (3,))
    return [case(shapes[at % len(shapes)], 65, 256, form) for at, form in enumerate(FORMS)]


IMPLEMENTATIONS = {
    "cpu_stored": Implementation(by_cpu, stored.why_not),
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
EMBEDDING = {"torch": Implementation(embedding_by_torch, dispatch.anywhere)}
KERNELS = {
    "block_linear": Kernel(block_linear, reference, spec, IMPLEMENTATIONS, cases, row_blocks),
    "block_embedding": Kernel(block_embedding, embedding_reference, embedding_spec, EMBEDDING, embedding_cases),
}
