"""A layer's experts as int8 or 4-bit codes, in the layout of the device that they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError, PatchError
from accelpatch.kernels.layouts import expert_tiles
from accelpatch.kernels.layouts.expert_pack import ExpertPack
from accelpatch.kernels.layouts.expert_stack import Stack, from_words, to_words
from accelpatch.kernels.ops.experts.experts import experts, tiles_for
from accelpatch.kernels.ops.experts.packed_experts import packed_experts
from accelpatch.kernels.ops.experts.routed_experts import routed_experts, why_not_one
from accelpatch.modules.experts import DOWN, UP, Experts, ExpertsForm, original_of
from accelpatch.modules.replacement import ON_DEMAND, PATH, adopt, without_casts
from accelpatch.modules.weight_view import WAY, UnpackedWeight, WeightView
from accelpatch.quant import int4, int8
from accelpatch.quant.weight import QuantizedWeight

PARTS = ("q", "scale", "offset", "bias")
Held = dict[str, Tensor | None]  # canonical tensors of one weight, by PARTS


class QuantizedExperts(Experts):
    """Experts as int8 or 4-bit codes. Held for this device: Stacks in buffers, or ExpertPacks where `packable`.

    A Stack of 4-bit codes lies in tiles where the HIP kernels run, or else in words.

    like: an empty tensor with the device and dtype of the replaced weights. bits: 8 or 4. The state dict holds the
    canonical tensors: gate_up_proj_q[E, N, K] int8 or [E, N, K / 2], ..._scale and ..._offset[E, N, G], ..._bias[E, N],
    in the operation's order of rows.
    """

    own_buffers: tuple[str, ...] = (*(f"{name}_{part}" for name in (UP, DOWN) for part in PARTS), "like")
    like: Tensor
    bits: int
    packable: bool
    packs: tuple[ExpertPack, ExpertPack] | None
    dtypes: tuple[torch.dtype, ...]
    kept: dict[str, torch.dtype]

    def hold(self, weights: dict[str, Held], original: nn.Module) -> None:
        """Take canonical weights in the place of the original's parameters."""
        parameter = original._parameters[UP]
        assert parameter is not None
        for name in (UP, DOWN, f"{UP}_bias", f"{DOWN}_bias"):
            self._parameters.pop(name, None)
        for name in self.own_buffers[:-1]:
            self.register_buffer(name, None, persistent=False)
        self.register_buffer("like", torch.empty(0, dtype=parameter.dtype, device=parameter.device), persistent=False)
        self.dtypes, self.packs, self.__dict__["trainable"] = (), None, parameter.requires_grad
        self._lay_out(weights)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.packs is not None:
            y = packed_experts(x, ids, weights, *self.packs[0], *self.packs[1], *self.gate)
            return y if residual is None else residual + y
        return experts(x, ids, weights, *self.stack(UP), *self.stack(DOWN), *self.gate, residual)

    def why_not_routed(self, chosen: int, dtype: torch.dtype) -> str | None:
        if self.packs is not None:
            return "its weights lie in the CPU's packs"
        return why_not_one(dtype, chosen, *self.stack(UP), *self.stack(DOWN), *self.gate)

    def compute_routed(
        self, x: Tensor, norm: tuple[Tensor, float, bool], logits: Tensor, choice: tuple[int, bool, bool],
        residual: Tensor,
    ) -> Tensor:  # fmt: skip
        return routed_experts(x, *norm, logits, *choice, *self.stack(UP), *self.stack(DOWN), *self.gate, residual)

    def stack(self, name: str) -> Stack:
        """A weight as the operation takes it."""
        w, *others = (self._buffers[f"{name}_{part}"] for part in PARTS)
        assert w is not None
        return Stack(w, *others)

    def canonical(self) -> dict[str, Held]:
        """Both weights' canonical tensors, by name and part."""
        return {name: self._canonical(name, place) for place, name in enumerate((UP, DOWN))}

    def _canonical(self, name: str, place: int) -> Held:
        stack = None if self.packs is not None else self.stack(name)
        if stack is not None and not stack.tiled:
            q = from_words(stack.w, self._width(name)) if self.bits == 4 else stack.w
            return dict(zip(PARTS, (q, *stack[1:]), strict=True))
        if stack is not None:
            held = dict(zip(PARTS, (*expert_tiles.untiled(stack, interleaved=name == UP), stack.bias), strict=True))
        else:
            assert self.packs is not None
            held = dict(zip(PARTS, (*self.packs[place].unpack(), self.packs[place].bias), strict=True))
        return {part: None if one is None else one.to(self.kept.get(part, one.dtype)) for part, one in held.items()}

    def _width(self, name: str) -> int:
        """K of a weight."""
        return self.stack(UP).rows // 2 if name == DOWN else self.stack(DOWN).rows

    def _lay_out(self, weights: dict[str, Held]) -> None:
        """Hold canonical weights in the layout for this device; nothing is changed where that fails."""
        device = self.like.device
        moved = {
            name: {part: None if one is None else one.to(device) for part, one in held.items()}
            for name, held in weights.items()
        }
        packs = None
        if self.packable and device.type == "cpu":
            up, down = (ExpertPack.pack(**held, bits=self.bits) for held in moved.values())  # type: ignore[arg-type]
            packs = (up, down)
        if self.bits == 4 and packs is None:
            laid = self._in_tiles(moved) or {
                name: held | {"q": to_words(held["q"])}  # type: ignore[arg-type]
                for name, held in moved.items()
            }
        else:
            laid = moved
        self.kept = {part: one.dtype for part, one in moved[UP].items() if one is not None}
        self.packs = packs
        for name, held in laid.items():
            for part in PARTS:
                self._buffers[f"{name}_{part}"] = None if packs is not None else held[part]

    def _in_tiles(self, weights: dict[str, Held]) -> dict[str, Held] | None:
        """Canonical weights in tiles, where the HIP kernels take them."""
        stacks = tiles_for(weights[UP], weights[DOWN], self.form.activation, self.like.dtype, self.like.device)
        if stacks is None:
            return None
        return {name: dict(zip(PARTS, one, strict=True)) for name, one in zip((UP, DOWN), stacks, strict=True)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model. Casts such as `model.half()` change neither codes nor scales."""
        weights = self.canonical() if self.packs is not None else None
        kept, dtype = {name: self._buffers[name] for name in self.own_buffers[:-1]}, self.like.dtype
        on_gpu = self.like.is_cuda
        super()._apply(fn, recurse)
        if self.like.dtype != dtype:
            self.dtypes = (*self.dtypes, self.like.dtype)
        without_casts(self, kept)
        if weights is not None and self.like.device.type != "cpu":
            self._lay_out(weights)
        elif weights is None:
            other = self.bits == 4 and self.like.is_cuda != on_gpu  # in tiles, or no longer
            if other or (self.packable and self.like.device.type == "cpu"):
                self._lay_out(self.canonical())
        return self

    def saved_tensors(self) -> dict[str, Tensor]:
        """The canonical tensors under their names in a state dict."""
        found = ((f"{name}_{part}", one) for name, held in self.canonical().items() for part, one in held.items())
        return {name: one for name, one in found if one is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, one in self.saved_tensors().items():
            destination[prefix + name] = one

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Take canonical tensors of the same format; a float weight is an error, which says what to do."""
        now = self.saved_tensors()
        given = {name: state_dict.pop(prefix + name) for name in now if prefix + name in state_dict}
        missing.extend(prefix + name for name in now if name not in given and strict)
        wrong = [name for name, one in given.items() if (one.shape, one.dtype) != (now[name].shape, now[name].dtype)]
        if prefix + UP in state_dict:
            errors.append(f"{prefix}{UP} is a float weight, and the experts are quantised: {WAY}")
        elif wrong:
            errors.append(f"{prefix}{wrong[0]} has another shape or dtype than the experts here: {WAY}")
        elif given:
            full = now | given
            parts = ((name, {part: full.get(f"{name}_{part}") for part in PARTS}) for name in (UP, DOWN))
            self._lay_out(
                {name: {k: None if v is None else v.clone() for k, v in held.items()} for name, held in parts}
            )
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    @property
    def packed_names(self) -> tuple[str, ...]:
        """Names of the original's parameters."""
        return (UP, DOWN, *((f"{UP}_bias", f"{DOWN}_bias") if self.form.bias else ()))

    def float_parameters(self) -> dict[str, nn.Parameter]:
        """The original's parameters, as the format holds their values."""
        return {name: nn.Parameter(one, requires_grad=self.trainable) for name, one in self._floats()}

    def _floats(self) -> Iterator[tuple[str, Tensor]]:
        for name, held in self.canonical().items():
            q, scale, offset, bias = (held[part] for part in PARTS)
            assert q is not None
            assert scale is not None
            weight = QuantizedWeight(*(None if one is None else one.flatten(0, 1) for one in (q, scale, offset)))  # type: ignore[arg-type]
            full = (int4 if self.bits == 4 else int8).dequantize(weight, self.like.dtype)
            yield name, original_of(self.form, name, full.view(*q.shape[:2], -1))
            if bias is not None:
                yield f"{name}_bias", original_of(self.form, name, bias.to(self.like.dtype))

    def __getattr__(self, name: str) -> Any:
        """The float weights in the original's shape and dtype, unpacked when they are read; they cannot be written."""
        if name in (UP, DOWN, f"{UP}_bias", f"{DOWN}_bias") and "like" in self.__dict__.get("_buffers", {}):
            found = dict(self._floats())
            if name in found:
                return UnpackedWeight(found[name], self._refuse_write, self._refuse).view(found[name])
        return super().__getattr__(name)

    def _refuse(self, message: str) -> nn.Module:
        raise PatchError(f"{vars(self).get(PATH, 'experts')}: {message}")

    def _refuse_write(self, weight: Tensor) -> None:
        self._refuse(f"its weights are packed and cannot be written; {WAY}")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; a new weight in place of a packed one, also under another name (pruning), goes to the
        original on demand, or is refused."""
        if (name in (UP, DOWN) or isinstance(param, WeightView)) and "like" in self.__dict__.get("_buffers", {}):
            if ON_DEMAND in vars(self):
                vars(self)[ON_DEMAND](self, "another weight").register_parameter(name, param)
                return
            self._refuse(f"its weights are packed and cannot be replaced; {WAY}")
        super().register_parameter(name, param)

    def hand_back(self, original: nn.Module) -> bool:
        """Move and cast the original's weights as this module was, before the original is put back."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter in original._parameters.values():
                assert parameter is not None
                data = parameter.data
                for dtype in self.dtypes:
                    data = data.to(dtype)
                parameter.data = data.to(self.like.device, self.like.dtype)
        return False


def quantised(
    original: nn.Module, form: ExpertsForm, weights: dict[str, Held], bits: int, packable: bool
) -> QuantizedExperts:
    """Make QuantizedExperts of canonical weights in the place of `original`, which is not changed."""
    new = adopt(QuantizedExperts, original)
    new.form, new.bits, new.packable = form, bits, packable
    new.hold(weights, original)
    return new


def checked(weights: dict[str, Held], experts: int, shapes: dict[str, tuple[int, int]], bits: int, bias: bool) -> None:
    """Raise KernelError unless canonical tensors from a file are weights of these shapes [N, K]."""
    for name, (n, k) in shapes.items():
        q, scale, offset, beside = (weights[name].get(part) for part in PARTS)
        columns = k * bits // 8
        if q is None or q.dtype != torch.int8 or list(q.shape) != [experts, n, columns]:
            raise KernelError(f"{name}_q is int8 [{experts}, {n}, {columns}]: write the checkpoint again")
        if scale is None or list(scale.shape[:2]) != [experts, n] or k % scale.shape[2] or not scale.isfinite().all():
            raise KernelError(f"{name}_scale is finite and [{experts}, {n}, G]: write the checkpoint again")
        if offset is not None and (offset.shape != scale.shape or not offset.isfinite().all()):
            raise KernelError(f"{name}_offset is finite and has the shape of the scale: write the checkpoint again")
        if (beside is not None) != bias or (beside is not None and list(beside.shape) != [experts, n]):
            raise KernelError(f"{name}_bias is [{experts}, {n}] where experts have one: write the checkpoint again")
