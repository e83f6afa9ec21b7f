"""A layer's experts: y[T, H] = sum over j of weights[T, j] * expert(ids[T, j])(x[T, H]).

    expert(e)(x) = gated(x @ gate_up[e]^T + bias) @ down[e]^T + bias      gate_up[E, 2 I, H], down[E, H, I]
    gated(both) = act(gate) * up              gate is the first half of the columns, up the second
    clamped_swiglu: (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit)       (GPT-OSS)

Weights are Stacks (layouts/expert_stack.py): float, int8 with a scale a row, e4m3 with a scale for each 128 values of a
row, or 4-bit codes in groups, in words or in tiles; those of e2m1 have a power of two for each 32 (OCP MXFP4), those of
NVFP4 a scale in e4m3 for each 16 and a factor a row. An id outside of 0 .. E - 1 adds nothing, and one that is named
twice adds twice. Which experts run is read on the device.

Source: Shazeer et al. 2017, arXiv:1701.06538; shapes as in transformers' experts interface (integrations/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.codebooks import FP8_CODES, NVFP4, NVFP4_GROUP
from accelpatch.kernels.codebooks import scale_dtype as scales_of
from accelpatch.kernels.layouts import int4_tiles
from accelpatch.kernels.layouts.expert_stack import BLOCK, Stack, from_words
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.experts import gemv as expert_gemv
from accelpatch.kernels.ops.experts import gradient
from accelpatch.kernels.ops.experts.cases import CLAMPED, cases
from accelpatch.kernels.ops.experts.reference import reference
from accelpatch.kernels.ops.experts.stacks import why_not_stack
from accelpatch.kernels.ops.linear import common, int4_linear
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "experts"
#: of which Triton has a form
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_tanh", "gelu_pytorch_tanh", "relu", CLAMPED)
MOST_EXPERTS, MOST_CHOSEN = 1024, 64
TABLES = ("q", "scale", "offset")  # of a canonical weight
BLOCKED = {NVFP4: NVFP4_GROUP, FP8_CODES: BLOCK}  # codes -> the only size of their groups


def clamped(both: Tensor, alpha: float, limit: float) -> Tensor:
    """GPT-OSS's gate of [..., 2 I]."""
    gate, up = both.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def gated(both: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """What `down` takes of [..., 2 I], by torch's own functions."""
    if activation == CLAMPED:
        return clamped(both, alpha, limit)
    gate, up = both.chunk(2, dim=-1)
    return gated_activation.ACTIVATIONS[activation](gate) * up


def added(y: Tensor, residual: Tensor | None = None) -> Tensor:
    """y, with the residual where there is one."""
    return y if residual is None else residual + y


def spec(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    check_routing(OP, x, ids, weights, given[8])
    return of_stacks(OP, x, ids.shape[1], given)


def of_stacks(op: str, x: Tensor, chosen: int, given: tuple[Any, ...]) -> Spec:
    """The Spec of x[T, H] and `given`, as `spec`'s, for so many experts a token. Raises KernelError."""
    up, down, activation = Stack(*given[:4]), Stack(*given[4:8]), given[8]
    alike = up.w.dim() == down.w.dim() and up.w.dim() in (3, 4)
    require(alike, op, f"weights are [E, N, K], or both in tiles, not {say(up.w)} and {say(down.w)}")
    experts, rows = len(up.w), up.n
    fits = given[11:] in ((), (None,)) or (given[11].shape == x.shape and given[11].dtype == x.dtype)
    require(fits, op, f"the residual has the shape and dtype of x, {say(x)}")
    require(experts >= 1 and rows >= 2 and rows % 2 == 0, op, f"gate and up are [E, 2 I, H], not {say(up.w)}")
    width, inner = x.shape[1], rows // 2
    for stack, n, k in ((up, rows, width), (down, width, inner)):
        reason = why_not_stack(stack, n, k, experts, x.device)
        require(reason is None, op, str(reason))
        alike = (stack.bits, stack.codes) == (up.bits, up.codes) and (
            stack.scale is not None or stack.w.dtype == x.dtype
        )
        require(alike, op, f"the weights are of one kind, and floats of x's dtype, not {say(stack.w)}")
    offset = up.codes or ("none" if up.offset is None and down.offset is None else "minimum")
    biased = up.bias is not None or down.bias is not None
    scale = scales_of(up.codes) if up.codes else None if up.scale is None else up.scale.dtype
    return of_shape(
        experts, width, inner, x.dtype, up.bits, (width // up.groups, inner // down.groups), tokens=len(x),
        chosen=chosen, activation=activation, biased=biased, scale_dtype=scale, offset=offset, tiled=up.tiled,
    )  # fmt: skip


def check_routing(op: str, x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> None:
    """Raise KernelError unless x[T, H], ids[T, k] and weights[T, k] fit together, and the activation is known."""
    require(x.dim() == 2 and x.dtype in FLOATS and x.shape[1] > 0, op, f"x is float [T, H], not {say(x)}")
    whole = ids.dtype in (torch.int64, torch.int32)
    require(ids.dim() == 2 and len(ids) == len(x) and whole, op, f"ids are int64 [T, k], not {say(ids)}")
    fits = weights.shape == ids.shape and weights.dtype in FLOATS
    require(fits, op, f"weights are float {list(ids.shape)} as ids, not {say(weights)}")
    there = {one.device for one in (x, ids, weights)}
    require(len(there) == 1, op, f"x, ids and weights lie on {', '.join(sorted(map(str, there)))}: move them together")
    known = activation == CLAMPED or activation in gated_activation.ACTIVATIONS
    require(known, op, f"no activation {activation!r}: keep these experts")


def of_shape(
    experts: int, width: int, inner: int, dtype: torch.dtype, bits: int, groups: tuple[int, int], *, tokens: int = 1,
    chosen: int = 1, activation: str = "silu", offset: str = "none", tiled: bool = False, biased: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> Spec:  # fmt: skip
    """The Spec of experts of this size, for planning. groups: values along K that share a scale, of both stacks.

    offset: "none", "minimum" or "e2m1". tiled: whether the weights lie in tiles. biased: whether they have biases.
    """
    sizes = {"M": tokens, "E": experts, "H": width, "I": inner, "k": chosen}
    options = {"bits": bits, "groups": groups, "activation": activation, "tiled": tiled, "biased": biased}
    return Spec(OP, sizes, dtype, scale_dtype, offset=offset, options=options)


def tiles_for(
    up: Mapping[str, Any], down: Mapping[str, Any], activation: str, dtype: torch.dtype, device: torch.device
) -> tuple[Stack, Stack] | None:
    """Tiles of canonical 4-bit weights where `hip` would run on them for x of `dtype`; else None.

    up, down: canonical tensors by name: q[E, N, K / 2], scale and offset[E, N, G], bias.
    """
    (q, scale, offset), (q_down, scale_down, offset_down) = ([one[name] for name in TABLES] for one in (up, down))
    alike = scale.dtype == scale_down.dtype and (offset is None) == (offset_down is None)
    exact = int4_tiles.exact(offset, scale.dtype) and int4_tiles.exact(offset_down, scale.dtype)
    width, inner = 2 * q.shape[2], 2 * q_down.shape[2]
    kind = Stack(q, scale).codes or ("none" if offset is None else "minimum")
    wanted = of_shape(
        len(q), width, inner, dtype, 4, (width // scale.shape[2], inner // scale_down.shape[2]), activation=activation,
        offset=kind, biased=up["bias"] is not None, scale_dtype=scale.dtype,
    )  # fmt: skip
    if device.type != "cuda" or not alike or expert_gemv.why_not_tiles(wanted, probe(device)) or not exact:
        return None
    return (
        Stack.of_tiles(q, scale, offset, up["bias"], interleaved=True),
        Stack.of_tiles(q_down, scale_down, offset_down, down["bias"], interleaved=False),
    )


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why the Triton kernels cannot run a spec; None where they can."""
    if reason := launch.why_not(device, spec.dtype):
        return reason
    if spec.sizes["E"] > MOST_EXPERTS or spec.sizes["k"] > MOST_CHOSEN:
        most = f"{MOST_EXPERTS} experts and {MOST_CHOSEN} a token"
        return f"{spec.sizes['E']} experts, {spec.sizes['k']} of them a token, are more than {most}"
    if spec.options["activation"] not in ACTIVATIONS:
        return f"its activation is {spec.options['activation']}"
    for k, group in zip((spec.sizes["H"], spec.sizes["I"]), spec.options["groups"], strict=True):
        if spec.offset in BLOCKED:
            if group != BLOCKED[spec.offset]:
                return f"groups of {group}, and those of {spec.offset} are {BLOCKED[spec.offset]}"
        elif group != k and (spec.options["bits"] == 8 or (group not in (32, 64) and group % BLOCK)):
            return (
                f"groups of {group}; int8 has a scale a row, 4 bits have groups of 32, 64, multiples of {BLOCK} or rows"
            )
    if max(spec.sizes["H"], spec.sizes["I"]) >= 1 << 23 or spec.sizes["M"] * spec.sizes["k"] >= 1 << 30:
        return "its sizes are beyond 32-bit indices"
    return None


def by_triton(*args: Any) -> Tensor:
    """The implementation `triton`."""
    from accelpatch.kernels.triton.grouped_experts import experts as run

    return run(*args)


def by_torch(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """The implementation `torch`: expert after expert, its weight dequantised in blocks of rows."""
    up, down, gate, residual = Stack(*given[:4]), Stack(*given[4:8]), given[8:11], given[11:]

    def expert(number: int, rows: Tensor) -> Tensor:
        inner = gated(_linear(rows, up, number, interleaved=True), *gate)
        return _linear(inner, down, number, interleaved=False)

    return added(by_expert(x, ids, weights, len(up.w), expert), *residual)


def by_expert(x: Tensor, ids: Tensor, weights: Tensor, experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum of expert(number, its rows of x) over those that are chosen, which the host reads."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for number, token, place in chosen(ids, experts):
        made = expert(number, x[token])
        y.index_add_(0, token, made.to(wide) * weights[token, place, None].to(wide))
    return y.to(x.dtype)


def chosen(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens, their places among the token's experts) for each that has any, in order."""
    for number in ids.unique().tolist():
        if 0 <= number < experts:
            yield number, *(ids == number).nonzero(as_tuple=True)


def _linear(x: Tensor, stack: Stack, number: int, interleaved: bool) -> Tensor:
    w, scale, offset, bias = (None if one is None else one[number] for one in stack)
    if stack.tiled:
        one = stack.expert(number).canonical(0, interleaved=interleaved)
        w, scale, offset = (None if part is None else part[0] for part in one[:3])
    assert w is not None
    bias = None if bias is None else bias.to(x.dtype)
    if scale is None:
        return functional.linear(x, w, bias)
    k = x.shape[1]

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w_rows, scales = w[start:stop], scale[start:stop]
        if stack.bits == 4:
            offsets = None if offset is None else offset[start:stop]
            codes = w_rows if stack.tiled else from_words(w_rows, k)
            return int4_linear.dequantize_rows(codes, scales, offsets, stack.codes, wide)
        return (w_rows.to(wide).unflatten(1, (scales.shape[1], -1)) * scales.to(wide)[:, :, None]).flatten(1)

    return common.by_row_blocks(x, w.shape[0], k, rows, bias)


@operation(OP)
def experts(
    x: Tensor, ids: Tensor, weights: Tensor,
    gate_up: Tensor, gate_up_scale: Tensor | None, gate_up_offset: Tensor | None, gate_up_bias: Tensor | None,
    down: Tensor, down_scale: Tensor | None, down_offset: Tensor | None, down_bias: Tensor | None,
    activation: str = "silu", alpha: float = 0.0, limit: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[T, H] in x's dtype, contiguous; see the module. x[T, H] float; ids[T, k] int64 or int32; weights[T, k] float.

    The rest: two Stacks of E experts, the activation's name, alpha and limit of clamped_swiglu, and residual[T, H] in
    x's dtype, which is added to the rounded sum. Raises KernelError for arguments that do not fit together.
    """
    given = (
        gate_up, gate_up_scale, gate_up_offset, gate_up_bias, down, down_scale, down_offset, down_bias,
        activation, alpha, limit, residual,
    )  # fmt: skip
    y: Tensor = dispatch.run(OP, spec, x.device, (x, ids, weights, *given))
    return y


@experts.register_fake
def _fake(x: Tensor, ids: Tensor, weights: Tensor, *given: Any, **named: Any) -> Tensor:
    return x.new_empty(x.shape)


@experts.recompute
def _differentiable(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    up, down = Stack(*given[:4]), Stack(*given[4:8])
    first = gradient.of_stack(up, x.shape[1], interleaved=True)
    second = gradient.of_stack(down, up.n // 2, interleaved=False)
    expert = gradient.by_linears(first, second, lambda both: gated(both, *given[8:11]))
    return added(by_expert(x, ids, weights, len(up.w), expert), *given[11:])


KERNELS = {
    OP: Kernel(
        experts, reference, spec,
        {
            "hip": Implementation(expert_gemv.by_hip, expert_gemv.why_not),
            "triton": Implementation(by_triton, triton_why_not),
            "torch": Implementation(by_torch, dispatch.anywhere),
        }, cases,
    )
}  # fmt: skip
