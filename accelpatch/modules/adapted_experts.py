"""PEFT's adapters of experts' weights (LoRA's `target_parameters`) on packed experts: two small GEMMs are added to
each.

PEFT adds an adapter to a weight for the length of a call, which a packed weight cannot take. Here its wrapper gives the
low-rank factors to the experts instead. PEFT's classes are recognised by name; PEFT is never imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from accelpatch.modules.quantized_experts import QuantizedExperts

WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")


class AdaptsPacked:
    """Mixin for PEFT's ParamWrapper around QuantizedExperts, or around another such wrapper."""

    def get_param(self) -> Tensor:
        """The shape, dtype and device of the weight; without its numbers while it is packed."""
        own = cast(Any, self)
        base = own.get_base_layer()
        if not isinstance(base, QuantizedExperts):
            return cast(Tensor, super().get_param())  # type: ignore[misc]
        return base.stand_ins()[own.parameter_name]

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        own = cast(Any, self)
        base = own.get_base_layer()
        if not isinstance(base, QuantizedExperts):  # unpatched since
            with super()._activate_lora(active_adapters):  # type: ignore[misc]
                yield
            return
        factors = [self._factors(name) for name in active_adapters if name in own.lora_A]
        before = base.low_rank
        base.__dict__["low_rank"] = {**before, own.parameter_name: factors} if factors else before
        try:
            yield
        finally:
            base.__dict__["low_rank"] = before

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        """scaling * down[E, r, K] and up[E, N, r] of an adapter, in the order of rows that PEFT knows."""
        own = cast(Any, self)
        down, up = own.lora_A[name].weight, own.lora_B[name].weight
        down = down.reshape(own.num_experts, -1, down.shape[-1])
        return own.scaling[name] * down, up.reshape(up.shape[0], -1, own.num_experts).permute(2, 0, 1)


def adapt_packed(model: nn.Module) -> None:
    """Let PEFT's wrappers around packed experts work on them; those that do so already stay as they are."""
    for module in model.modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) != WRAPPER or isinstance(module, AdaptsPacked):
            continue
        if isinstance(cast(Any, module).get_base_layer(), QuantizedExperts):
            module.__class__ = _over_packed(cast(Any, kind))


@functools.cache
def _over_packed(kind: type) -> Any:
    """PEFT asks for its class by name."""
    return type(kind.__name__, (AdaptsPacked, kind), {"__module__": kind.__module__})
