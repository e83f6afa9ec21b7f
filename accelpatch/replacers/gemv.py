"""Linear layers in their own precision, memory-bound GEMV kernels for few tokens (GPU only)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.models.family import LINEAR_CLASSES
from accelpatch.modules.gemv_linear import GemvConv1D, GemvLinear, rows_of_
from accelpatch.modules.replacement import adopt
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site

NATIVE = "hip"


class Gemv(Replacer):
    """nn.Linear and Conv1D by the GEMV kernels. The weight is shared with the original, even where it is tied."""

    name = "gemv"
    fusable = True
    ties = True
    rounds = False

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        name = type(site.original).__name__
        if name not in LINEAR_CLASSES or site.n is None or site.k is None:
            return Reason(f"{name} is not known to be a plain linear layer")
        if device.kind == "cpu":
            return Reason("torch's own GEMM is used on a CPU")
        spec = float_linear.of_shape(site.n, site.k, getattr(torch, site.dtype))
        if reason := dispatch.why_not(spec.op, NATIVE, spec, device):
            return Reason(f"torch's own GEMM is used: {reason}")
        libraries = float_linear.libraries(spec.dtype)
        return Choice(NATIVE, site.token_bytes, site.token_bytes, site.bytes, libraries=libraries, spec=spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        if type(site.original).__name__ != "Conv1D":
            return adopt(GemvLinear, site.original)
        rows_of_(site.original)
        return adopt(GemvConv1D, site.original)

    def build_tied(self, site: Site, tied: Site, built: nn.Module) -> nn.Module:
        """The tied module unchanged: an embedding reads only the rows of its tokens."""
        return adopt(type(tied.original), tied.original)
