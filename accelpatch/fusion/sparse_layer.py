"""A decoder layer with experts in six launches, or eight.

The launches: norm, q, k and v; rotary embedding, cache write and attention; o and residual; norm and router; norm, the
choice of experts, their gate, up and activation; their down, the weighted sum and the residual. Where experts do not
run by the HIP kernels norm and choice are launches of their own (`Experts.why_not_routed`), and many tokens take a few
more, which sort them by expert. Nothing waits for the host: which experts run is read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.fusion.across import across_of
from accelpatch.fusion.call import Call
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_layer import FusedLayer, _input_of
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.experts.choose_experts import choose_experts
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.modules.experts import Experts


@dataclass(frozen=True, eq=False)
class SparseMLP:
    """Router and experts. chosen: experts a token. normalise, narrow: as in `choose_experts`.

    routed: whether experts take the norm before them and the choice into their launches, for few tokens.
    """

    router: FusedLinear
    experts: Experts
    chosen: int
    normalise: bool
    narrow: bool
    routed: bool = False

    def __call__(self, normal: Tensor, residual: Tensor) -> Tensor:
        """residual + the experts' sum for the rows normal[M, K]."""
        logits = self.router.large_m(normal)
        ids, weights = choose_experts.function(logits, self.chosen, self.normalise, self.narrow)
        if (across := across_of(self.experts)) is not None:
            return across(self.experts.compute(normal, ids, weights), residual)
        return self.experts.compute(normal, ids, weights, residual)

    def of_few(self, x: Tensor, norm: FusedNorm) -> Tensor:
        """x + the experts' sum for the rows norm(x[M, K]), where `routed`; M up to MAX_GEMV_ROWS."""
        choice = (self.chosen, self.normalise, self.narrow)
        given, across = (norm.weight, norm.eps, norm.plus_one), across_of(self.experts)
        if across is not None:
            part = self.experts.compute_routed(x, given, self.router(x, norm), choice, torch.zeros_like(x))
            return across(part, x)
        return self.experts.compute_routed(x, given, self.router(x, norm), choice, x)


@dataclass(frozen=True, eq=False)
class FusedSparseLayer(FusedLayer):
    """One decoder layer whose MLP is `sparse`; gate_up and down are None."""

    sparse: SparseMLP | None = None

    def __call__(self, x: Tensor, pending: Tensor | None, call: Call, place: int) -> tuple[Tensor, Tensor | None]:
        """As FusedLayer's."""
        assert self.sparse is not None
        assert self.mlp_norm is not None
        if x.shape[0] > MAX_GEMV_ROWS:
            normal, x = _input_of(self.qkv, self.attention_norm, x, pending)
            attended = self._attend(self.qkv.large_m(normal), call, place)
            x, pending = self._with_residual(self.after_attention, self.o.large_m(attended), x)
        else:
            x = x if pending is None else x + pending
            attended = self._attend(self.qkv(x, self.attention_norm), call, place)
            x, pending = self._added(self.o, attended, self.after_attention, x), None
            if self.sparse.routed and not self.mlp_norm.layer:
                return self.sparse.of_few(x, self.mlp_norm), None
        normal, total = self.mlp_norm.of_sum(x, pending)
        return self.sparse(normal, total), None


def sparse_mlp(layer: LayerDescription, dtype: torch.dtype) -> SparseMLP:
    """The router and the experts of a layer. Raises CannotFuse."""
    form = layer.sparse
    assert form is not None
    router = getattr(layer.mlp, form.router)
    if router.weight.dtype != dtype or not router.weight.is_contiguous():
        raise CannotFuse(f"its router is {router.weight.dtype}, or is not contiguous")
    if form.bias and router.bias.dtype != dtype:
        raise CannotFuse(f"its router's bias is {router.bias.dtype}")
    normalise = form.normalise if isinstance(form.normalise, bool) else bool(getattr(router, form.normalise))
    chosen = int(getattr(router, form.chosen))
    experts: Experts = layer.experts
    routed = experts.why_not_routed(chosen, dtype) is None
    linear = FusedLinear(Plain(router.weight), router.bias if form.bias else None)
    return SparseMLP(linear, experts, chosen, normalise, form.narrow, routed)
