"""Reads the experts of a patched layer and their router off its modules, for the native CPU step."""

from __future__ import annotations

from typing import Any

import torch

from accelpatch.fusion.adapters import is_adapter
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.spread import OFFLOADED, is_offloaded
from accelpatch.kernels.cpu import step_experts as native
from accelpatch.kernels.cpu.step_experts import StepExperts
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.expert_pack import ExpertPack
from accelpatch.modules.experts import DOWN
from accelpatch.modules.quantized_experts import QuantizedExperts


def step_experts(layer: LayerDescription) -> StepExperts:
    """The experts of a replaced layer and their router. Raises CannotFuse where they are none of a native step."""
    form, experts = layer.sparse, layer.experts
    assert form is not None
    router = getattr(layer.mlp, form.router)
    if is_offloaded(experts) or is_offloaded(router):
        raise CannotFuse(f"{type(experts).__name__}: {OFFLOADED}")
    if not isinstance(experts, QuantizedExperts) or not isinstance(experts.layouts[0], ExpertPack):
        raise CannotFuse("its experts are not packed for the CPU")
    if experts.low_rank or is_adapter(router):
        raise CannotFuse("an adapter stands beside its experts or its router")
    if experts.like.dtype != torch.float32 or router.weight.dtype != torch.float32:
        raise CannotFuse(f"its experts are for {experts.like.dtype}, its router is {router.weight.dtype}")
    normalise = form.normalise if isinstance(form.normalise, bool) else bool(getattr(router, form.normalise))
    dense = Pack.dense(router.weight, router.bias if form.bias else None)
    up, down = experts.layouts
    chosen = int(getattr(router, form.chosen))
    return StepExperts(dense, up, down, chosen, normalise, experts.form.alpha, experts.form.limit)


def planned_sizes(layer: LayerDescription) -> dict[str, tuple[int, int]]:
    """(N, K) of gate, up and down of one of an original layer's experts. Raises CannotFuse where they are none of a
    native step."""
    form, experts = layer.sparse, layer.experts
    assert form is not None
    number, *size = getattr(experts, DOWN).shape
    hidden, inner = reversed(size) if getattr(experts, "is_transposed", False) else size
    chosen: Any = getattr(getattr(layer.mlp, form.router), form.chosen)
    if reason := native.why_not(number, inner, int(chosen)):
        raise CannotFuse(reason)
    return {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
