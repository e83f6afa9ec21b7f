"""The tensors of SmoothQuant's int8 OPT layer, made from a float one and static scales, and the checks of such tensors.

    weight, bias   q = rint(w / s), s = max|w| / 127                  one scale a tensor
    a, b           input_scale weight_scale / output_scale, and bias_scale / output_scale
    norms          weight / output_scale, bias / output_scale, float32

The scale of q has head_size^-0.5 in it, as the weight of q has. Source: Xiao et al. 2022, arXiv:2211.10438, and its
code.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.quant import int8

LEVELS = 127
STATIC = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1")  # int8 outputs
FLOAT = ("self_attn.out_proj", "fc2")
NORMS = ("self_attn_layer_norm", "final_layer_norm")
FACTORS = ("self_attn.qk_bmm", "self_attn.pv_bmm")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # in files; float32 here, which holds the others' values


def forms(width: int, inner: int) -> dict[str, tuple[bool, tuple[int, ...]]]:
    """Name in the layer -> (whether it is int8, its shape). width: hidden size; inner: of the feed-forward layer."""
    found: dict[str, tuple[bool, tuple[int, ...]]] = {}
    for name in (*STATIC, *FLOAT):
        n, k = (inner if name == "fc1" else width), (inner if name == "fc2" else width)
        found |= {f"{name}.weight": (True, (n, k)), f"{name}.bias": (name in STATIC, (1, n))}
        found |= {f"{name}.{factor}": (False, ()) for factor in ("ab" if name in STATIC else "a")}
    for name in NORMS:
        found |= {f"{name}.{part}": (False, (width,)) for part in ("weight", "bias")}
    return found | {f"{name}.a": (False, ()) for name in FACTORS}


def checked(tensors: Mapping[str, Tensor], width: int, inner: int) -> dict[str, Tensor]:
    """The tensors of a layer of these sizes by their names: int8 and float32, contiguous.

    A bias may come as [N], a factor as [1]. Raises KernelError, which begins with the name of a tensor that is missing,
    of another layout, shape or dtype, or whose scale is no positive number.
    """
    due, found = forms(width, inner), dict[str, Tensor]()
    if missing := sorted(due.keys() - tensors.keys()):
        raise KernelError(f"{missing[0]} is missing")
    if other := sorted(tensors.keys() - due.keys()):
        raise KernelError(f"{other[0]} is not in the layout of SmoothQuant's OPT")
    for name, (whole, shape) in due.items():
        one = tensors[name]
        if not (one.dtype == torch.int8 if whole else one.dtype in FLOATS):
            raise KernelError(f"{name} is {one.dtype}, and {'int8' if whole else 'float'} belongs here")
        if tuple(one.shape) not in (shape, shape[1:] if len(shape) == 2 and shape[0] == 1 else shape or (1,)):
            raise KernelError(f"{name} is {list(one.shape)}, and {list(shape)} belongs here")
        one = (one if whole else one.float()).reshape(shape).contiguous()
        if name.endswith((".a", ".b")) and not 0 < float(one) < float("inf"):
            raise KernelError(f"{name} is {float(one)}, and a scale is a positive number")
        if not whole and not bool(one.isfinite().all()):
            raise KernelError(f"{name} has NaN or infinity")
        found[name] = one
    return found


def linear(weight: Tensor, bias: Tensor | None, input_scale: float, output_scale: float | None) -> dict[str, Tensor]:
    """The tensors of a linear layer with weight[N, K] and bias[N]. output_scale: None for a float output."""
    q, scale = _by_tensor(weight)
    bias = torch.zeros(len(weight), device=weight.device) if bias is None else bias
    made = {"weight": q, "bias": bias.detach().to(torch.float32, copy=True).view(1, -1)}
    if output_scale is None:
        return made | {"a": input_scale * scale}
    made["bias"], of_bias = _by_tensor(made["bias"])
    return made | {"a": input_scale * scale / output_scale, "b": of_bias / output_scale}


def _by_tensor(values: Tensor) -> tuple[Tensor, Tensor]:
    """(int8, its one scale, a float32 scalar); of zeros the scale is 1 / 127."""
    if not bool(values.isfinite().all()):
        raise KernelError("a weight or bias is not finite")
    flat = values.detach().reshape(1, -1).float()
    if not bool(flat.any()):
        return torch.zeros_like(values, dtype=torch.int8), torch.tensor(1 / LEVELS, device=values.device)
    made = int8.quantize(flat)
    return made.w.view(values.shape), made.scale.reshape(()).float()


def norm(weight: Tensor, bias: Tensor, output_scale: float) -> dict[str, Tensor]:
    """The tensors of a norm with weight[K] and bias[K]."""
    return {"weight": weight.detach().float() / output_scale, "bias": bias.detach().float() / output_scale}


def factors(q: float, k: float, v: float, out: float, device: torch.device) -> dict[str, Tensor]:
    """The tensors of the two batched products: scales of q (with head_size^-0.5), k, v, and out_proj's input."""
    found = {"self_attn.qk_bmm.a": q * k, "self_attn.pv_bmm.a": v / (LEVELS * out)}
    return {name: torch.tensor(one, device=device) for name, one in found.items()}
