"""What a linear kernel computes, in plain torch: a norm, the product, a bias, an activation or a gate, a residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.check import parity


def reference(w: Tensor, x: Tensor, kind: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The product of x[M, K] and w[N, K] with what stands before and after it, computed in ``dtype``.

    kind: of a launch's arguments norm, norm_weight, norm_bias, bias, activation and residual; none for the product.
    """
    h = x.to(dtype)
    weight, bias = kind.get("norm_weight"), kind.get("norm_bias")
    if kind.get("norm") in ("rms", "rms_plus_one"):
        wide = h if dtype == torch.float64 else h.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        h = (wide.to(dtype) * (weight.to(dtype) + (kind["norm"] == "rms_plus_one"))).to(dtype)
    elif kind.get("norm") == "layer":
        h = functional.layer_norm(h, h.shape[-1:], weight.to(dtype), bias.to(dtype))
    y = functional.linear(h, w.to(dtype), None if kind.get("bias") is None else kind["bias"].to(dtype))
    acts = {
        "silu": functional.silu,
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    }
    act = kind.get("activation", "none")
    if act == "silu_gate":
        gate, up = y.chunk(2, -1)
        y = functional.silu(gate) * up
    elif act != "none":
        y = acts[act](y)
    return y if kind.get("residual") is None else y + kind["residual"].to(dtype)


def wrong(y: Tensor, w: Tensor, x: Tensor, kind: Mapping[str, Any]) -> str:
    """Why y breaks the float rule; empty where it holds. w: what the weight stands for, in float64 where packed."""
    exact, plain = reference(w, x, kind, torch.float64), reference(w, x, kind, x.dtype)
    return parity.compare(y, exact, parity.torch_error(plain, exact)).reason
