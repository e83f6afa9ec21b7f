"""A linear layer whose bfloat16 weight is held in 12 bits a value without loss, and given back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch.errors import KernelError
from accelpatch.kernels import compact_tiles
from accelpatch.kernels.compact_linear import compact_linear, undone
from accelpatch.kernels.compact_tiles import CompactTiles
from accelpatch.kernels.gemv import gemv
from accelpatch.modules.autocast import autocast
from accelpatch.modules.weight_view import PackedWeight


class CompactLinear(PackedWeight):
    """y = x @ weight^T + bias.

    tiles: the only copy of the weight; None where its values have no such form (`refusal` says why): it is a parameter
    then, shared with the original. `like` is empty: it carries the weight's device and dtype, and follows `model.to()`.
    """

    own_buffers = ("like",)

    bias: Tensor | None
    like: Tensor
    tiles: CompactTiles | None
    refusal: str

    def hold(self) -> None:
        """Make tiles of the weight that was taken over, where that can be."""
        weight = self._parameters["weight"]
        assert weight is not None
        self.tiles, self.refusal, self.trainable = None, "", weight.requires_grad
        with torch.inference_mode(False), torch.no_grad():
            self.register_buffer("like", torch.empty(0, dtype=weight.dtype, device=weight.device), persistent=False)
            try:
                self.tiles = compact_tiles.encode(weight)
            except KernelError as error:
                self.refusal = str(error)
            else:
                del self._parameters["weight"]

    def dequantized(self) -> Tensor:
        """The weight[N, K], bit for bit."""
        held = self._parameters.get("weight")
        if held is not None:
            return held.detach()
        assert self.tiles is not None
        return undone(self.tiles).to(self.like.dtype)

    def repack(self, weight: Tensor) -> None:
        """Hold other numbers, in tiles where they have that form."""
        self.tiles = None
        self._parameters["weight"] = nn.Parameter(weight.to(self.like, copy=True), requires_grad=self.trainable)
        self.hold()

    @property
    def gives_back(self) -> bool:
        """Whether the original's weight is held here, so that the original need not."""
        return self.tiles is not None

    @property
    def weight_bytes(self) -> int:
        """What one product reads; of tiles that are paired, half."""
        if self.tiles is None:
            return self.dequantized().nbytes
        return sum(table.nbytes for table in self.tiles[:3]) * self.tiles.n // self.tiles.rows

    def whole(self) -> None:
        """Hold the weight as it was: for neighbours whose weights have no tiles."""
        if self.tiles is not None:
            with torch.inference_mode(False), torch.no_grad():
                held = nn.Parameter(self.dequantized(), requires_grad=self.trainable)
            self.tiles = self.lent = None
            self._parameters["weight"] = held

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        x = autocast(x)
        if x.dtype != self.like.dtype:  # torch casts the weight too
            return functional.linear(x, self.dequantized(), self.bias)
        if self.tiles is None:
            return gemv(x, self.weight, self.bias)
        return compact_linear(x, *self.tiles, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; cast to another dtype, the weight is rounded as a parameter is."""
        self.lent = None
        if fn(self.like).dtype != self.like.dtype:
            self.whole()
            super()._apply(fn, recurse)
            self.hold()
            return self
        super()._apply(fn, recurse)
        if self.tiles is not None and self.tiles.w.device != self.like.device:
            own = compact_tiles.alone(self.tiles)  # or a neighbour that they are paired with would hold them twice
            w, scale, outliers = (table.to(self.like.device) for table in own[:3])
            self.tiles = own._replace(w=w, scale=scale, outliers=outliers)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The weight under its own name, as the original's."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.setdefault(prefix + "weight", self.dequantized())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        """Take a weight as the original would."""
        self.lent = None
        given = self.tiles is not None and prefix + "weight" in state_dict
        if given:
            self.whole()
        elif self.tiles is not None and strict:
            missing.append(prefix + "weight")
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        if given:
            self.hold()

    def give_back(self, original: nn.Module) -> None:
        """Give the original its weight, where this module was moved, if it is held here alone."""
        parameter, held = original._parameters["weight"], self._parameters.get("weight")
        assert parameter is not None
        if parameter is not held:
            with torch.inference_mode(False), torch.no_grad():
                parameter.data = self.dequantized()
