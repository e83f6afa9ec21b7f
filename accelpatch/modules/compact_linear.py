"""A linear layer whose bfloat16 weight is stored losslessly in 12 bits per value, and restored bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.linear.by_layout import linear
from accelpatch.kernels.ops.linear.compact_linear import unpacked
from accelpatch.modules.autocast import autocast
from accelpatch.modules.packed_weight import PackedWeight


class CompactLinear(PackedWeight):
    """y = x @ weight^T + bias.

    tiles: the only copy of the weight. None where its values do not fit the format (`refusal` says why); the weight is
    then a parameter shared with the original. like: an empty tensor that has the weight's device and dtype and follows
    `model.to()`.
    """

    own_buffers = ("like",)

    bias: Tensor | None
    like: Tensor
    tiles: CompactTiles | None
    refusal: str
    rewritten = False  # whether the weight has been written since the patch
    made: nn.Parameter | None = None  # the parameter that was unpacked from tiles

    def hold(self) -> None:
        """Pack the parameter `weight` into tiles where its values fit the format."""
        weight = self._parameters["weight"]
        assert weight is not None
        self.trainable, self.refusal = weight.requires_grad, ""
        with torch.inference_mode(False), torch.no_grad():
            self.register_buffer("like", torch.empty(0, dtype=weight.dtype, device=weight.device), persistent=False)
            try:
                self.tiles = CompactTiles.pack(weight)
            except KernelError as error:
                self.tiles, self.refusal = None, str(error)
            else:
                self.__dict__["made"] = None
                del self._parameters["weight"]

    @property
    def layout(self) -> CompactTiles | Plain:
        """The weight as it lies in memory."""
        return Plain(self.weight) if self.tiles is None else self.tiles

    @layout.setter
    def layout(self, value: CompactTiles) -> None:
        self.tiles = value

    @property
    def is_packed(self) -> bool:
        """Whether the weight is in tiles."""
        return self.tiles is not None

    @property
    def holds(self) -> tuple[str, ...]:
        """Names of the parameters that `give_back` restores in the original."""
        return ("weight",) if self.is_packed or self._parameters["weight"] is self.made else ()

    @property
    def weight_shape(self) -> tuple[int, int]:
        """As of PackedWeight."""
        return self.layout.n, self.layout.k

    def dequantized(self) -> Tensor:
        """The weight [N, K], bit for bit."""
        if self.tiles is None:
            return self.weight.detach()
        return unpacked(self.tiles).to(self.like.dtype)

    def repack(self, weight: Tensor) -> None:
        """Hold a new weight [N, K], in tiles where its values fit the format."""
        self.fill_views()
        self._become(nn.Parameter(weight.to(self.like, copy=True), requires_grad=self.trainable))
        self.rewritten = True
        self.hold()

    def _become(self, parameter: nn.Parameter) -> None:
        """Hold the weight as a parameter that this module made, not the original's."""
        self._parameters["weight"] = self.__dict__["made"] = parameter

    @property
    def gives_back(self) -> bool:
        """Whether the packed weight can restore the original's, which can then be freed."""
        return self.tiles is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes that one linear call reads of the weight; half the tensors where gate and up
        share interleaved tiles."""
        if self.tiles is None:
            return self.dequantized().nbytes
        return self.tiles.nbytes * self.tiles.n // self.tiles.rows

    def unpack(self) -> None:
        """Unpack the weight into a parameter, because a neighbour to be concatenated with has no tiles."""
        if self.tiles is not None:
            self.fill_views()
            with torch.inference_mode(False), torch.no_grad():
                self._become(nn.Parameter(self.dequantized(), requires_grad=self.trainable))
            self.tiles = None
            self.changed()

    def forward(self, x: Tensor) -> Tensor:
        """x[..., K] -> y[..., N] in x's dtype."""
        x = autocast(x)
        if x.dtype != self.like.dtype:  # torch casts the weight too
            return functional.linear(x, self.dequantized(), self.bias)
        return linear(x, self.layout, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model. A cast to another dtype rounds the weight as it would a parameter."""
        self.changed()
        if fn(self.like).dtype != self.like.dtype:
            self.unpack()
            super()._apply(fn, recurse)
            self.hold()
            return self
        super()._apply(fn, recurse)
        if self.tiles is not None and self.tiles.w.device != self.like.device:
            own = self.tiles.alone()  # interleaved tiles would be copied for each of the two modules
            self.tiles = own.replace(**{name: one.to(self.like.device) for name, one in own.tables.items()})
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the unpacked weight under "weight", as the original would."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.setdefault(prefix + "weight", self.weight.detach())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        """Load a float weight and pack it."""
        given = self.tiles is not None and prefix + "weight" in state_dict
        if given:
            self.unpack()
        elif self.tiles is not None and strict:
            missing.append(prefix + "weight")
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        if given:
            self.rewritten = True
            self.hold()

    def give_back(self, original: nn.Module) -> None:
        """Restore the original's weight on this module's device, where it was freed or has been rewritten since."""
        parameter = original._parameters["weight"]
        assert parameter is not None
        if parameter is not self._parameters.get("weight") and (parameter.numel() == 0 or self.rewritten):
            self.changed()
            with torch.inference_mode(False), torch.no_grad():
                parameter.data = self.dequantized()
            if not parameter.is_inference():
                parameter.requires_grad_(self.trainable)
            self.rewritten = False
