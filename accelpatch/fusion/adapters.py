"""LoRA adapters (PEFT) around linear layers inside fused layers: two small GEMMs beside the large one.

    y = w x + sum over active adapters of scaling B (A x)

PEFT's classes are recognised by their attributes; PEFT is never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.layouts.layout import Layout
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated, gated_activation
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm

SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "cast_input_dtype_enabled")
ALIGNED = 8  # concatenated ranks are padded to a multiple: rows of 16 bytes


@dataclass(frozen=True, eq=False)
class Adapted:
    """A linear layer with its LoRA adapters concatenated: down[R, K], which includes the scaling, then up[N, R].

    activation: as in FusedLinear, a launch of its own.
    """

    base: FusedLinear
    down: FusedLinear
    up: FusedLinear
    activation: str | None = None

    def __call__(
        self, x: Tensor, norm: FusedNorm | None = None, gate: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """As FusedLinear.__call__; a gate is a separate launch."""
        alone = gate is None and self.activation is None
        y = self.base(x, norm, residual=residual if alone else None)
        y = self.up(self.down(x, norm), residual=y)
        if alone:
            return y
        y = self._activated(y) if gate is None else gated_activation(*y.chunk(2, dim=-1), gate)
        return y if residual is None else residual + y

    @property
    def weight(self) -> Layout:
        """The base layer's weight as it lies in memory."""
        return self.base.weight

    def large_m(self, x: Tensor, gate: str | None = None) -> Tensor:
        """As FusedLinear.large_m."""
        y = self.base.large_m(x) + self.up.large_m(self.down.large_m(x))
        return self._activated(y) if gate is None else gated(y, gate)

    def _activated(self, y: Tensor) -> Tensor:
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


def is_adapter(module: Any) -> bool:
    """Whether a module is a PEFT wrapper around another."""
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names")


def base_of(module: Any) -> Any:
    """The module inside PEFT wrappers; any other module itself."""
    while is_adapter(module):
        module = module.base_layer
    return module


def state_of(adapters: Iterable[nn.Module]) -> tuple[str, ...]:
    """The adapters' settings that are not tensors: active names, scalings, switches."""
    states = map(vars, adapters)
    return tuple(repr([state.get(name) for name in SWITCHES]) for state in states)


def with_adapters(base: FusedLinear, modules: Sequence[Any], dtype: torch.dtype) -> FusedLinear | Adapted:
    """`base`, the linear layers inside `modules` concatenated, with the active adapters of each. Raises CannotFuse."""
    rows, downs, ups = 0, [], []
    for module in modules:
        low = active(module)
        inner = base_of(module)
        size = inner.nf if hasattr(inner, "nf") else inner.out_features  # of a Conv1D
        for down, up in low:
            wide = torch.zeros(base.n, up.shape[1], dtype=up.dtype, device=up.device)
            wide[rows : rows + size] = up
            downs.append(down)
            ups.append(wide)
        rows += size
    if not downs:
        return base
    place = base.weight.w.device
    if any(part.device != place for part in (*downs, *ups)):
        raise CannotFuse(f"an adapter lies on another device than {place}")
    down, up = torch.cat(downs), torch.cat(ups, 1)
    more = -down.shape[0] % ALIGNED
    down, up = nn.functional.pad(down, (0, 0, 0, more)), nn.functional.pad(up, (0, more))
    return Adapted(base, FusedLinear(Plain(down.to(dtype))), FusedLinear(Plain(up.to(dtype).contiguous())))


def active(module: Any) -> list[tuple[Tensor, Tensor]]:
    """(scaling * A[r, K], B[N, r]) of each active adapter around a module."""
    if not is_adapter(module):
        return []
    kind = type(module)
    if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ != "Linear" or is_adapter(module.base_layer):
        raise CannotFuse(f"an adapter is {kind.__name__} of {kind.__module__}")
    if module.merged_adapters and module.disable_adapters:
        raise CannotFuse("an adapter is merged and switched off")
    if module.merged_adapters or module.disable_adapters:
        return []
    names = [name for name in module.active_adapters if name in module.lora_A]
    return [_low_rank(module, name) for name in names]


def _low_rank(module: Any, name: str) -> tuple[Tensor, Tensor]:
    down: Any = module.lora_A[name]
    up: Any = module.lora_B[name]
    dropout = module.lora_dropout[name]
    if name in module.lora_variant or type(down) is not nn.Linear or type(up) is not nn.Linear:
        raise CannotFuse(f"the adapter {name} is not plain LoRA")
    if any(isinstance(one.bias, Tensor) for one in (down, up)):
        raise CannotFuse(f"the adapter {name} has a bias")
    if type(dropout) is not nn.Identity and dropout.training:
        raise CannotFuse(f"the adapter {name} has dropout: call model.eval()")
    return module.scaling[name] * down.weight.detach(), up.weight.detach()
