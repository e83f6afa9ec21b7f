"""Attention of one token over a static cache: against torch's attention in float64, on a GPU or interpreted.

Without a GPU the Triton kernel runs through Triton's interpreter, in a process of its own, as in test_triton.py; the
plain torch form that a CPU runs is always tested.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import KNOWN
from accelpatch.kernels import decode_attention
from accelpatch.kernels.decode_attention import AttentionShape, reference_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
here = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="run by test_through_the_interpreter, in its process"
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cuts bfloat16 off where GPUs round


@dataclass(frozen=True)
class Case:
    """What differs from one step to the next. padding: hidden slots at the left of the second row."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    slot: int = 70
    capacity: int = 256
    window: int = 0
    padding: int = 0
    norms: bool = False
    rows: int = 2


CASES = {
    "grouped": Case(),
    "one-group": Case(heads=2, kv_heads=1, size=128, rows=1),
    "seven-to-one": Case(heads=7, kv_heads=1),
    "size-80": Case(size=80),
    "size-96": Case(size=96, padding=65),
    "first-slot": Case(slot=0),
    "last-slot": Case(slot=255),
    "end-of-a-block": Case(slot=64, padding=3),
    "padding": Case(padding=69),
    "window": Case(window=20),
    "window-and-padding": Case(window=60, padding=40),
    "norms": Case(norms=True, size=16),
    "two-runs": Case(capacity=512, slot=300, padding=270),
    "window-in-the-last-run": Case(capacity=1024, slot=800, window=100),
    "runs-not-used": Case(capacity=1024, slot=100),
}


def made(case: Case, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], AttentionShape]:
    """Arguments; what lies in the cache where nothing was cached, or behind the padding, is NaN."""
    torch.manual_seed(3)
    norms = [(torch.rand(case.size) + 0.5).to(DEVICE, dtype) if case.norms else None for _ in range(2)]
    frequencies = (10000 ** (-torch.arange(0, case.size, 2) / case.size)).to(DEVICE)
    shape = AttentionShape(
        case.heads, case.kv_heads, case.size, case.size**-0.5, frequencies, 1.0, case.window, *norms, 1e-6
    )  # fmt: skip
    cache = [torch.randn(case.rows, case.kv_heads, case.capacity, case.size).to(DEVICE, dtype) for _ in range(2)]
    mask = torch.ones(case.rows, case.capacity, dtype=torch.int64, device=DEVICE)
    mask[-1, : case.padding] = 0
    for one in cache:
        one[:, :, case.slot :] = float("nan")
        one[-1, :, : case.padding] = float("nan")
    slot = torch.tensor([case.slot], device=DEVICE)
    positions = torch.full((case.rows, 1), case.slot, device=DEVICE)
    positions[-1] -= case.padding
    qkv = torch.randn(case.rows, shape.columns).to(DEVICE, dtype)
    return (qkv, positions, slot, mask, *cache), shape


def in_float64(args: tuple[Tensor, ...], shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """(y, k, v) by torch's own attention, row by row over the slots that it sees, and angles as complex numbers."""
    qkv, positions, slot, mask, keys, values = (
        one.cpu().double() if one.is_floating_point() else one.cpu() for one in args
    )
    new = slot.item()
    parts = qkv.view(qkv.shape[0], -1, shape.size)
    q, k, v = parts.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if shape.q_norm is not None and shape.k_norm is not None:
        q, k = (
            functional.rms_norm(p, [shape.size], w.cpu().double(), shape.eps)
            for p, w in ((q, shape.q_norm), (k, shape.k_norm))
        )
    angle = positions[:, :, None].double() * shape.inv_freq.cpu().double()
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(*one.chunk(2, dim=-1)) * turn for one in (q, k))
    q, k = (torch.cat([one.real, one.imag], dim=-1) for one in (q, k))
    rows = []
    for row in range(qkv.shape[0]):
        first = max(0, new + 1 - shape.window) if shape.window else 0
        at = [one for one in range(first, new) if mask[row, one]]
        seen = [torch.cat([held[row][:, at], one[row][:, None]], dim=1) for held, one in ((keys, k), (values, v))]
        rows.append(
            functional.scaled_dot_product_attention(q[row][:, None], *seen, scale=shape.scaling, enable_gqa=True)
        )
    return torch.stack(rows).flatten(1), k, v


def assert_float_rule(step: Any, case: Case, dtype: torch.dtype) -> None:
    args, shape = made(case, dtype)
    due = in_float64(args, shape)
    plain, mine = ([one.clone() for one in args] for _ in range(2))
    outputs = [
        (run(*given, shape), *(one[:, :, case.slot] for one in given[4:]))
        for run, given in ((reference_, plain), (step, mine))
    ]
    for index, exact in enumerate(due):
        errors = [(out[index].double().cpu() - exact).abs().max().item() for out in outputs]
        least = torch.finfo(dtype).eps * exact.abs().max().item()
        assert errors[1] <= 2 * errors[0] + least, (index, errors)
    for before, after in zip(args, mine, strict=True):  # nothing else was written to
        if before.dim() == 4:
            after = after.clone()
            after[:, :, case.slot] = before[:, :, case.slot]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_cpu(case: Case) -> None:
    (qkv, *rest), shape = made(case, torch.float64)
    due = in_float64((qkv, *rest), shape)
    y = (
        decode_attention.decode_attention_(qkv.cpu(), *(one.cpu() for one in rest), shape)
        if DEVICE.type == "cpu"
        else None
    )
    if y is not None:
        torch.testing.assert_close(y, due[0], rtol=1e-4, atol=1e-4)  # angles are float32


@needs_triton
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the test below runs as it is")
def test_through_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "triton_kernel",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@needs_triton
@here
@pytest.mark.parametrize("dtype", [LOW, torch.float32], ids=["low", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_triton_kernel(case: Case, dtype: torch.dtype) -> None:
    from accelpatch.kernels.triton import decode_attention as kernel

    assert_float_rule(kernel.decode_attention_, case, dtype)


def test_reasons() -> None:
    shape = AttentionShape(4, 2, 64, 0.125, torch.ones(32))
    assert decode_attention.why_not(shape, torch.float32, KNOWN["sm_90"]) in (None, "Triton is not installed")
    odd = AttentionShape(4, 3, 63, 0.125, torch.ones(32))
    assert "63" in str(decode_attention.why_not(odd, torch.float32, KNOWN["sm_90"]))
    assert math.isclose(shape.columns, 512)
