"""Weight-only linear layers with codes of a codebook: nf4 and fp4, as bitsandbytes has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.modules.codebook_linear import CodebookLinear, FP4WeightOnlyLinear, NF4WeightOnlyLinear
from accelpatch.modules.weight_only import quantized
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site
from accelpatch.quant import QuantizedWeight, codebook
from accelpatch.quant.weight import check_held
from accelpatch.replacers.weight_only import (
    NATIVE,
    bias_bytes,
    dividing,
    kernel_for,
    libraries,
    slower,
    token_bytes,
    unfit,
    weight_of,
)  # fmt: skip

SCALE_BYTES = 4  # float32


class NF4WeightOnly(Replacer):
    """4-bit codes of nf4 with a float32 scale for each group along K, the group's largest magnitude."""

    name = "nf4_weight_only"
    module: ClassVar[type[CodebookLinear]] = NF4WeightOnlyLinear
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"group_size": (int, list)}

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        if reason := unfit(site):
            return Reason(reason)
        if isinstance(site.original, nn.Embedding):
            return Reason("there is no 4-bit embedding; use int8_weight_only")
        assert site.n is not None
        assert site.k is not None
        wanted = options.get("group_size", [64, 32])
        group = next(iter(dividing(wanted, site.k)), None)
        if group is None or site.k % 2:
            return Reason(f"K = {site.k} is odd, or a multiple of none of the group sizes {wanted}")
        try:
            kernel, note = kernel_for("codebook_linear", site, device, group, self.module.codebook)
        except KernelError as error:
            return Reason(str(error))
        resident = site.n * (site.k // 2 + site.k // group * SCALE_BYTES) + bias_bytes(site)
        return Choice(
            kernel, site.token_bytes, token_bytes(site, resident), resident, {"group_size": group}, note,
            libraries=libraries(kernel, "tiled_int4_linear", site, device, group, self.module.codebook),
            slower=slower(kernel, device),
        )  # fmt: skip

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        weight = weight_of(site.original)
        made = codebook.quantize(weight, group_size=choice.detail["group_size"], codebook=self.module.codebook)
        return self._module(site, choice, made)

    def restore(self, site: Site, choice: Choice, held: QuantizedWeight) -> nn.Module:
        check_held(held, site.n, site.k, (torch.int8,), (torch.float32,), per_byte=2, zero_code=None)
        if held.offset is not None:
            raise KernelError(f"a weight of {self.module.codebook} has no offset: write the checkpoint again")
        return self._module(site, choice, held)

    def _module(self, site: Site, choice: Choice, weight: QuantizedWeight) -> nn.Module:
        module: nn.Module = quantized(self.module, site.original, weight, choice.kernel == NATIVE)
        return module


class FP4WeightOnly(NF4WeightOnly):
    """The same with codes of fp4."""

    name = "fp4_weight_only"
    module = FP4WeightOnlyLinear
