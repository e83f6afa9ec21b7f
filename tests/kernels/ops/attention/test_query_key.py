"""Norms over all of q and of k, and the interleaved rotary embedding: transformers' own numbers, in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention.query_key import prepare_query_key_, reference_
from accelpatch.kernels.query_key_form import QueryKey
from tests.support.interpreted import DEVICE, HERE, interpret, needs_triton

SHAPES = {"grouped": (4, 2, 16), "one head": (1, 1, 8), "odd": (3, 3, 10)}
FORMS = ("norm", "rotary", "partial", "both")


@needs_triton
@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__, "-k", "triton_kernel")


def made(shape: str, form: str, rows: int, dtype: torch.dtype, device: Any = "cpu") -> tuple[Tensor, Tensor, QueryKey]:
    heads, kv_heads, size = SHAPES[shape]
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * size, generator=generator).to(device, dtype)
    positions = torch.randint(0, 500, (rows,), generator=generator).to(device)
    norms = [(torch.rand(count * size, generator=generator) + 0.5).to(device, dtype) for count in (heads, kv_heads)]
    count = size // 2 if form != "partial" else size // 4
    frequencies = (1.0 / 10000 ** (torch.arange(count) / count)).to(device)
    return qkv, positions, QueryKey(
        heads, kv_heads, size,
        *(norms if form in ("norm", "both") else (None, None)), 1e-5, None if form == "norm" else frequencies, 1.1,
    )  # fmt: skip


def by_transformers(qkv: Tensor, positions: Tensor, form: QueryKey) -> Tensor:
    parts = list(qkv.split([count * form.size for count in (form.heads, form.kv_heads, form.kv_heads)], dim=1))
    for place, weight in enumerate((form.q_norm, form.k_norm)):
        if weight is not None:
            wide = parts[place].float()
            parts[place] = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + form.eps)).to(qkv.dtype)
    if form.inv_freq is not None:
        angle = positions[None, :, None].float() * form.inv_freq.float()
        cos, sin = (
            (one(torch.cat((angle, angle), -1)) * form.rope_scaling).to(qkv.dtype) for one in (torch.cos, torch.sin)
        )
        heads = [part.view(1, len(qkv), -1, form.size).transpose(1, 2) for part in parts[:2]]
        parts[:2] = [one.transpose(1, 2).reshape(len(qkv), -1) for one in apply_rotary_pos_emb(*heads, cos, sin)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_transformers_does(dtype: torch.dtype, shape: str, form: str, rows: int) -> None:
    qkv, positions, what = made(shape, form, rows, dtype)
    due = by_transformers(qkv, positions, what)
    prepare_query_key_(qkv, positions, what)
    torch.testing.assert_close(qkv, due, rtol=0, atol=0)


@needs_triton
@pytest.mark.skipif(not HERE, reason="through the interpreter, above")
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_triton_kernel(shape: str, form: str, rows: int) -> None:
    from accelpatch.kernels.triton import query_key

    qkv, positions, what = made(shape, form, rows, torch.float32, DEVICE)
    whole = torch.cat([qkv.new_full((1, qkv.shape[1]), 7), qkv, qkv.new_full((1, qkv.shape[1]), 7)])
    due = qkv.clone()
    reference_(due, positions, what)
    query_key.prepare_query_key_(whole[1:-1], positions, what)
    torch.testing.assert_close(whole[1:-1], due, rtol=2e-6, atol=2e-6)
    assert bool((whole[0] == 7).all() and (whole[-1] == 7).all())


def test_what_does_not_fit_is_refused() -> None:
    qkv, positions, what = made("grouped", "both", 3, torch.float32)
    for wrong in ((qkv[:, :-1], positions), (qkv, positions[:2]), (qkv, positions.int())):
        with pytest.raises(KernelError, match="prepare_query_key"):
            prepare_query_key_(*wrong, what)
    spec = dispatch.kernel("prepare_query_key").spec(qkv, positions, what)
    assert dispatch.choose("prepare_query_key", spec, probe("cpu")) == "torch"
