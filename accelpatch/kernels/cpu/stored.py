"""Bindings of the native linear layer over weights as a checkpoint stores them: GGUF's blocks, and e4m3 with scales."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import MAX_STORED, PLAIN, Stored, check, native, pointer, threads
from accelpatch.kernels.spec import Spec

E4M3 = "e4m3"
#: as numbered in the C interface
FORMS = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_NL", "IQ4_XS", "Q4_K", "Q6_K", E4M3,
)  # fmt: skip
VALUES = 1 << 22  # of the weight that are dequantised at a time, where x has many rows


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `linear` cannot run a spec; None where it can."""
    if device.kind != "cpu":
        return "the native kernel runs on a CPU"
    if spec.dtype not in native_library.DTYPES:
        return f"the native kernel computes in float32, not in {spec.dtype}"
    return native_library.why_not(device)


def linear(x: Tensor, data: Tensor, form: str, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """y[..., N] = x[..., K] @ w^T + bias, summed in float32, in x's dtype (float32, bfloat16 or float16).

    data: uint8 [N, row bytes] of blocks of `form`, or e4m3fn [N, K] with scale float [N, 1] or [N, ceil(K / 128)].
    For few rows the weight is dequantised in registers; for many in slices, each multiplied by torch's GEMM.
    """
    k = x.shape[-1]
    rows = x.reshape(-1, k).to(torch.float32).contiguous()
    stored_data, float_bias = data.contiguous(), None if bias is None else bias.to(torch.float32).contiguous()
    scales = None if scale is None else scale.to(torch.float32).contiguous()
    y = torch.empty(len(rows), len(data), **PLAIN)
    if len(rows) <= MAX_STORED:
        weight = _struct(stored_data, form, k, scales, float_bias)
        status = native().ap_stored_run(byref(weight), pointer(rows), len(rows), k, pointer(y), len(data), threads())
        check(status, f"x of shape {list(x.shape)}")
    else:
        _by_slices(rows, stored_data, form, scales, float_bias, y)
    return y.to(x.dtype).view(*x.shape[:-1], len(data))


def _by_slices(x: Tensor, data: Tensor, form: str, scale: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
    k, step = x.shape[1], max(1, VALUES // x.shape[1])
    for first in range(0, len(data), step):
        part = slice(first, first + step)
        values = torch.empty(len(data[part]), k, **PLAIN)
        weight = _struct(data[part], form, k, None if scale is None else scale[part], None)
        check(native().ap_stored_values(byref(weight), pointer(values), threads()), f"a weight of {form}")
        y[:, part] = functional.linear(x, values, None if bias is None else bias[part])


def _struct(data: Tensor, form: str, k: int, scale: Tensor | None, bias: Tensor | None) -> Stored:
    if form not in FORMS:
        raise KernelError(f"the native kernel reads {', '.join(FORMS)}, not {form}")
    scales = 0 if scale is None else scale.shape[1]
    return Stored(FORMS.index(form), 0, len(data), k, scales, pointer(data), pointer(scale), pointer(bias))
