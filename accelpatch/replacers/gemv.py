"""Linear layers in their own precision, memory-bound GEMV kernels for few tokens (GPU only)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.errors import PlanError
from accelpatch.kernels import added, dispatch
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.models.family import LINEAR_CLASSES
from accelpatch.modules.gemv_linear import GemvConv1D, GemvLinear, rows_of_
from accelpatch.modules.replacement import adopt
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site

NATIVE = "hip"
KERNEL = "kernel"  # option: the name of a user's implementation


class Gemv(Replacer):
    """nn.Linear and Conv1D by the GEMV kernels, or by a user's implementation: the one that the recipe names, or one
    that goes before ours for a single row. The weight is shared with the original, even where it is tied."""

    name = "gemv"
    options: ClassVar = {KERNEL: (str,)}
    fusable = True
    ties = True
    rounds = False

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        name = type(site.original).__name__
        if name not in LINEAR_CLASSES or site.n is None or site.k is None:
            return Reason(f"{name} is not known to be a plain linear layer")
        dtype, named = getattr(torch, site.dtype), options.get(KERNEL, "")
        spec = float_linear.of_shape(site.n, site.k, dtype, prefer=named)
        for own in added.first(spec.op, spec):
            reason = dispatch.why_not(spec.op, own, spec, device)
            if reason is None:
                detail = {KERNEL: own}
                return Choice(own, site.token_bytes, site.token_bytes, site.bytes, detail=detail, spec=spec)
            if named:
                return Reason(f"{own}: {reason}")
        if device.kind == "cpu":
            return Reason("torch's own GEMM is used on a CPU")
        if reason := dispatch.why_not(spec.op, NATIVE, spec, device):
            return Reason(f"torch's own GEMM is used: {reason}")
        libraries = float_linear.libraries(spec.dtype)
        return Choice(NATIVE, site.token_bytes, site.token_bytes, site.bytes, libraries=libraries, spec=spec)

    def check_options(self, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        named, known = options.get(KERNEL), added.of(float_linear.OP)
        if named is not None and named not in known:
            raise PlanError(
                f"no implementation of linear is called {named} (added are: {', '.join(known) or 'none'}): decorate "
                "one with @accelpatch.implementation, in the program or in a file that --plugin names"
            )

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        plain = type(site.original).__name__ != "Conv1D"
        if not plain:
            rows_of_(site.original)
        new = adopt(GemvLinear, site.original) if plain else adopt(GemvConv1D, site.original)
        new.kernel = choice.detail.get(KERNEL, "")
        return new

    def build_tied(self, site: Site, tied: Site, built: nn.Module) -> nn.Module:
        """The tied module unchanged: an embedding reads only the rows of its tokens."""
        return adopt(type(tied.original), tied.original)
