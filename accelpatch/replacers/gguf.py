"""Weights of a GGUF file as they are stored: blocks with scales of two levels, and what stands for all formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.gguf_blocks import FORMS, row_bytes
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks as Blocks
from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.ops.linear import block_linear, packed_linear
from accelpatch.kernels.spec import Spec
from accelpatch.modules.quantized_linear import BlockQuantEmbedding, BlockQuantLinear, quantized
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site
from accelpatch.quant.blocks import check_blocks
from accelpatch.replacers.proposing import LinearReplacer
from accelpatch.replacers.weight_kernels import CPU_LIBRARY, NATIVE, STORED, bias_bytes, token_bytes

FLOAT = "its weight is float, and this takes a GGUF file's as they are stored: give a .gguf file, or another recipe"


class AsStored(Replacer):
    """Each weight of a GGUF file in the format that it has there. A file that loads puts the rules of its formats in
    this one's place (checkpoints/as_stored.py), so that it meets float weights alone, which it leaves."""

    name = "as_stored"
    ties = True

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        return Reason(FLOAT)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        raise KernelError(FLOAT)


class GgufBlocks(LinearReplacer):
    """GGUF's blocks, bit for bit, for linear layers, heads and embeddings. form: a key of layouts.gguf_blocks.FORMS.

    They are read from a checkpoint; floats are not quantised to them.
    """

    name = "gguf_blocks"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"form": (str,)}
    ties = True

    def of_matrix(self, site: Site, n: int, k: int, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        weight, form = site.original._parameters.get("weight"), options.get("form", "")
        if weight is None or not weight.is_meta:  # a model that loads, or is planned, has no values yet
            return Reason(FLOAT)
        if type(site.original).__name__ == "Conv1D":
            return Reason("Conv1D holds its weight [K, N], and blocks lie along K")
        resident = n * row_bytes(form, k) + bias_bytes(site)
        kernel, spec = _kernel(site, n, k, form, device)
        libraries = (CPU_LIBRARY,) if kernel in (NATIVE, STORED) else ()
        after = token_bytes(site, resident)
        return Choice(kernel, site.token_bytes, after, resident, {"form": form}, libraries=libraries, spec=spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        raise KernelError(FLOAT)

    def weight(self, choice: Choice, parts: Mapping[str, Tensor | None]) -> RowMajor:
        return Blocks.of(parts, form=choice.detail["form"])

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        check_blocks(saved.w, choice.detail["form"], site.n, site.k)
        return _module(site.original, saved, choice.kernel == NATIVE)

    def build_tied(self, site: Site, tied: Site, built: nn.Module) -> nn.Module:
        assert isinstance(built, QuantizedModule)
        return _module(tied.original, built, built.packable)

    def parts(self, site: Site, names: Any) -> list[str] | None:
        return [name for name in (f"{site.path}.q",) if name in names]


def _kernel(site: Site, n: int, k: int, form: str, device: Device) -> tuple[str, Spec]:
    """The implementation that would run for one token, and the call. Raises KernelError where none can."""
    dtype, table = getattr(torch, site.dtype), isinstance(site.original, nn.Embedding)
    packed = packed_linear.of_shape(
        n, k, dtype, FORMS[form].group, "none", op="packed_embedding" if table else "packed_linear"
    )
    if (Pack.why_not_blocks(n, k, form) or dispatch.why_not(packed.op, NATIVE, packed, device)) is None:
        return NATIVE, packed
    op = "block_embedding" if table else "block_linear"
    spec = block_linear.of_shape(n, k, dtype, form, op=op)
    return dispatch.choose(op, spec, device), spec


def _module(original: nn.Module, weight: RowMajor | QuantizedModule, packable: bool) -> nn.Module:
    kind = BlockQuantEmbedding if isinstance(original, nn.Embedding) else BlockQuantLinear
    module: nn.Module = quantized(kind, original, weight, packable)
    return module
