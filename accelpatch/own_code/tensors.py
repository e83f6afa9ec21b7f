"""Tensors that are more, or less, than numbers in rows at an address: no kernel reads those by their pointer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
# torch's own stand-ins while it traces a program, and parameters that hold plain codes, which replacers read
KNOWN = ("torch._subclasses", "bitsandbytes")


def unusual(tensor: Tensor) -> str | None:
    """What a tensor is that kernels cannot read: sparse, quantised by torch, or of a class that computes by code of its
    own, such as torchao's; None for a plain one."""
    cls = type(tensor)
    if cls not in PLAIN and _computes(cls):
        return f"{cls.__module__.partition('.')[0]}'s {cls.__name__}"
    if tensor.layout is not torch.strided:
        return f"a tensor in the layout {tensor.layout}"
    if tensor.is_quantized or tensor.is_nested:
        return f"a {'quantised' if tensor.is_quantized else 'nested'} tensor of torch"
    return "a view that torch negates when it is read" if tensor.is_neg() or tensor.is_conj() else None


def _computes(cls: type) -> bool:
    """Whether a tensor's class computes by code of its own."""
    own = [vars(base) for base in cls.__mro__[: cls.__mro__.index(Tensor)] if base is not nn.Parameter]
    by_itself = any(name in names for names in own for name in ("__torch_function__", "__torch_dispatch__"))
    return by_itself and not cls.__module__.startswith(KNOWN)


def unusual_in(module: Any) -> str | None:
    """Why the parameters and buffers that a module has itself cannot be read by kernels; None where they can."""
    for table in ("_parameters", "_buffers"):
        for name, tensor in vars(module).get(table, {}).items():
            if tensor is not None and (what := unusual(tensor)) is not None:
                return f"its {name} is {what}, which kernels cannot read"
    return None
