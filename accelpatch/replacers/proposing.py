"""Bases of replacers whose kernels decide whether a site is replaced, and of those of linear layers' weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.models.family import EMBEDDING_CLASSES, LINEAR_CLASSES
from accelpatch.modules.quantized_linear import renormalises
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site


class KernelReplacer(Replacer):
    """A replacer that stays away where no kernel can run: the text of a KernelError is the Reason."""

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        try:
            return self.proposed(site, options, device)
        except KernelError as error:
            return Reason(str(error))

    @abstractmethod
    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        """As `propose`, which may raise KernelError."""


class LinearReplacer(KernelReplacer):
    """A replacer of plain linear layers. no_table: why an embedding stays; None where its table is replaced too."""

    no_table: ClassVar[str | None] = None

    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        reason = unfit(site) or (self.no_table if isinstance(site.original, nn.Embedding) else None)
        if reason is not None:
            return Reason(reason)
        assert site.n is not None
        assert site.k is not None
        return self.of_matrix(site, site.n, site.k, options, device)

    @abstractmethod
    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        """As `proposed`, for a float weight [n, k]."""


def unfit(site: Site) -> str | None:
    """Why a site is neither a linear layer nor an embedding; None where it is one."""
    for member in (site, *site.tied):
        name = type(member.original).__name__
        if name not in LINEAR_CLASSES | EMBEDDING_CLASSES:
            return f"{name} is not known to be a plain linear layer"
        if member.n is None or not torch.empty(0, dtype=getattr(torch, member.dtype)).is_floating_point():
            return f"its weight is {member.dtype}, not a float matrix"
        if reason := renormalises(member.original):
            return reason
    return None
