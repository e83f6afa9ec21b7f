"""A layer's experts as int8, e4m3 or 4-bit codes, in the layout of the device that they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError, PatchError
from accelpatch.kernels.codebooks import E4M3, FP8_CODES, NVFP4
from accelpatch.kernels.layouts.expert_pack import ExpertPack
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int4Rows, Int8Rows
from accelpatch.kernels.ops.experts import gradient
from accelpatch.kernels.ops.experts.experts import by_expert, experts, gated, tiles_for
from accelpatch.kernels.ops.experts.packed_experts import packed_experts
from accelpatch.kernels.ops.experts.routed_experts import routed_experts, why_not_one
from accelpatch.modules.experts import DOWN, UP, Experts, ExpertsForm, in_order, original_of
from accelpatch.modules.replacement import ON_DEMAND, PATH, adopt
from accelpatch.modules.weight_view import WAY, UnpackedWeight, WeightView
from accelpatch.quant.formats import dequantize
from accelpatch.quant.fp8 import NAN

PARTS = ("q", "scale", "offset", "bias")
WeightTensors = dict[str, Tensor | None]  # canonical tensors of one weight, by PARTS


class QuantizedExperts(Experts):
    """Experts as int8 or 4-bit codes, in the layouts of this device: Stacks, or ExpertPacks where `packable`.

    A Stack of 4-bit codes lies in tiles where the HIP kernels run, or else in words.

    layouts: of gate_up_proj and of down_proj. like: an empty tensor with the device and dtype of the replaced weights.
    bits: 8 or 4. low_rank: name of a weight -> down[E, r, K] and up[E, N, r] of each adapter that is active in this
    call, in the original's order of rows. The state dict holds the canonical tensors: gate_up_proj_q[E, N, K] int8 or
    e4m3, or [E, N, K / 2], ..._scale and ..._offset[E, N, G], ..._bias[E, N], in the operation's order of rows; of
    NVFP4 ..._offset[E, N, 1] has the factors of rows.
    """

    own_buffers: tuple[str, ...] = ("like",)
    like: Tensor
    bits: int
    packable: bool
    layouts: tuple[Any, Any]
    dtypes: tuple[torch.dtype, ...]
    kept: dict[str, torch.dtype]
    low_rank: Mapping[str, Sequence[tuple[Tensor, Tensor]]] = {}

    def hold(self, weights: dict[str, WeightTensors], original: nn.Module) -> None:
        """Take canonical weights in the place of the original's parameters."""
        parameter = original._parameters[UP]
        assert parameter is not None
        for name in (UP, DOWN, f"{UP}_bias", f"{DOWN}_bias"):
            self._parameters.pop(name, None)
        self.register_buffer("like", torch.empty(0, dtype=parameter.dtype, device=parameter.device), persistent=False)
        self.dtypes, self.__dict__["trainable"] = (), parameter.requires_grad
        self._lay_out(weights)

    @property
    def packed(self) -> bool:
        """Whether the weights lie in the CPU's packs."""
        return isinstance(self.layouts[0], ExpertPack)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        up, down = self.layouts
        if self.low_rank:
            y = self._adapted(x, ids, weights)
            return y if residual is None else residual + y
        if self.packed:
            y = packed_experts(x, ids, weights, *up, *down, *self.gate)
            return y if residual is None else residual + y
        return experts(x, ids, weights, *up, *down, *self.gate, residual)

    def _adapted(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum with the adapters, one expert after the other."""
        up, down = self.layouts
        if self.packed:
            linears = gradient.of_pack(up), gradient.of_pack(down)
        else:
            first = gradient.of_stack(up, x.shape[1], interleaved=True)
            linears = first, gradient.of_stack(down, up.n // 2, interleaved=False)
        first, second = (
            gradient.with_low_rank(one, [(a, in_order(self.form, name, b)) for a, b in self.low_rank.get(name, ())])
            for name, one in zip((UP, DOWN), linears, strict=True)
        )
        expert = gradient.by_linears(first, second, lambda both: gated(both, *self.gate))
        return by_expert(x, ids, weights, self.count, expert)

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.layouts[0][0])

    def stand_ins(self) -> dict[str, nn.Parameter]:
        """The original's 3-D parameters without their numbers: shape, dtype and device alone, in a few bytes."""
        up, down = self.layouts
        order = -1 if self.form.transposed else 1
        shapes = {UP: (up.n, down.n)[::order], DOWN: (down.n, up.n // 2)[::order]}
        empty = {name: self.like.new_zeros(1).expand(self.count, *shape) for name, shape in shapes.items()}
        return {name: nn.Parameter(one, requires_grad=False) for name, one in empty.items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As in nn.Module, and the stand-ins: PEFT looks here for what an adapter is for. A walk over the whole model
        does not call this."""
        yield from super().named_parameters(*args, **kwargs)
        yield from self.stand_ins().items()

    def why_not_routed(self, chosen: int, dtype: torch.dtype) -> str | None:
        if self.packed:
            return "its weights lie in the CPU's packs"
        up, down = self.layouts
        return why_not_one(dtype, chosen, *up, *down, *self.gate)

    def compute_routed(
        self, x: Tensor, norm: tuple[Tensor, float, bool], logits: Tensor, choice: tuple[int, bool, bool],
        residual: Tensor,
    ) -> Tensor:  # fmt: skip
        up, down = self.layouts
        return routed_experts(x, *norm, logits, *choice, *up, *down, *self.gate, residual)

    def canonical(self) -> dict[str, WeightTensors]:
        """Both weights' canonical tensors, by name and part."""
        up, down = self.layouts
        widths = (down.n, up.n // 2)  # K of each
        made = {}
        for name, one, k in zip((UP, DOWN), self.layouts, widths, strict=True):
            parts = dict(zip(PARTS, one.canonical(k, interleaved=name == UP), strict=True))
            made[name] = {part: None if t is None else t.to(self.kept.get(part, t.dtype)) for part, t in parts.items()}
        return made

    def _lay_out(self, weights: dict[str, WeightTensors]) -> None:
        """Hold canonical weights in the layout for this device; nothing is changed where that fails."""
        device = self.like.device
        moved = {
            name: {part: None if one is None else one.to(device) for part, one in tensors.items()}
            for name, tensors in weights.items()
        }
        up, down = moved[UP], moved[DOWN]
        if self.packable and device.type == "cpu":
            kind: Any = partial(ExpertPack.pack, bits=self.bits)
        else:
            kind = Stack.of_codes if self.bits == 4 else Stack.of_int8
        tiles = tiles_for(up, down, self.form.activation, self.like.dtype, device) if self.bits == 4 else None
        self.layouts = tiles or (kind(**up), kind(**down))
        self.kept = {part: one.dtype for part, one in up.items() if one is not None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model. Casts such as `model.half()` change neither codes nor scales."""
        dtype, device = self.like.dtype, self.like.device
        super()._apply(fn, recurse)
        if self.like.dtype != dtype:
            self.dtypes = (*self.dtypes, self.like.dtype)
        if self.like.device != device:
            self._lay_out(self.canonical())
        return self

    def saved_tensors(self) -> dict[str, Tensor]:
        """The canonical tensors under their names in a state dict."""
        found = ((f"{name}_{part}", one) for name, tensors in self.canonical().items() for part, one in tensors.items())
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
                {name: {k: None if v is None else v.clone() for k, v in tensors.items()} for name, tensors in parts}
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
        for name, tensors in self.canonical().items():
            parts = {part: None if one is None else one.flatten(0, 1) for part, one in tensors.items()}
            bias, count = parts.pop("bias"), len(tensors["q"])  # type: ignore[arg-type]
            rows: Any = Int4Rows.of(parts, codes=self.layouts[0].codes) if self.bits == 4 else Int8Rows.of(parts)
            rows = Fp8Rows(rows.w, rows.scale) if rows.w.dtype == E4M3 else rows
            full = dequantize(rows, self.like.dtype).view(count, -1, rows.k)
            yield name, original_of(self.form, name, full)
            if bias is not None:
                yield f"{name}_bias", original_of(self.form, name, bias.view(count, -1).to(self.like.dtype))

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
    original: nn.Module, form: ExpertsForm, weights: dict[str, WeightTensors], bits: int, packable: bool
) -> QuantizedExperts:
    """Make QuantizedExperts of canonical weights in the place of `original`, which is not changed."""
    new = adopt(QuantizedExperts, original)
    new.form, new.bits, new.packable = form, bits, packable
    new.hold(weights, original)
    return new


def checked(
    weights: dict[str, WeightTensors], experts: int, shapes: dict[str, tuple[int, int]], bits: int, bias: bool,
    dtypes: tuple[torch.dtype, ...], group: int | None = None, kind: str = "none",
) -> None:  # fmt: skip
    """Raise KernelError unless canonical tensors from a file are weights of these shapes [N, K]. dtypes: of scales.
    group: the only size of groups, where a format has one. kind: of offset, or what the codes are of."""
    form = E4M3 if kind == FP8_CODES else torch.int8
    for name, (n, k) in shapes.items():
        q, scale, offset, bias_rows = (weights[name].get(part) for part in PARTS)
        columns = k * bits // 8
        if q is None or q.dtype != form or list(q.shape) != [experts, n, columns]:
            codes = f"{str(form).removeprefix('torch.')} [{experts}, {n}, {columns}]"
            raise KernelError(f"{name}_q must be {codes}: write the checkpoint again")
        if scale is None or scale.dtype not in dtypes or not _fits(scale, experts, n, k, group):
            groups = f"{k // group}]" if group else f"G], G dividing {k}"
            due = f"finite {dtypes[0]} [{experts}, {n}, {groups}"
            raise KernelError(f"{name}_scale must be {due}: write the checkpoint again")
        if form == E4M3 and bool((q.view(torch.uint8) & NAN == NAN).any()):
            raise KernelError(f"{name}_q has NaN: write the checkpoint again")
        if kind == NVFP4:
            if offset is None or offset.dtype != torch.float64 or list(offset.shape) != [experts, n, 1]:
                raise KernelError(f"{name}_offset must be float64 [{experts}, {n}, 1]: write the checkpoint again")
            if not bool((offset.isfinite() & (offset > 0)).all()):
                raise KernelError(f"{name}_offset is not positive everywhere: write the checkpoint again")
        elif offset is not None and (offset.shape != scale.shape or not offset.isfinite().all()):
            raise KernelError(f"{name}_offset must be finite, in the shape of the scale: write the checkpoint again")
        if (bias_rows is not None) != bias or (bias_rows is not None and list(bias_rows.shape) != [experts, n]):
            due = f"must be [{experts}, {n}]" if bias else "does not belong to experts without biases"
            raise KernelError(f"{name}_bias {due}: write the checkpoint again")


def _fits(scale: Tensor, experts: int, n: int, k: int, group: int | None) -> bool:
    """Whether scales are finite [experts, n, G], of groups that divide K, or of `group` values."""
    if scale.dim() != 3 or list(scale.shape[:2]) != [experts, n] or not scale.shape[2] or k % scale.shape[2]:
        return False
    if group not in (None, k // scale.shape[2]):
        return False
    return bool(scale.float().isfinite().all())  # 8-bit floats have no isfinite of their own
