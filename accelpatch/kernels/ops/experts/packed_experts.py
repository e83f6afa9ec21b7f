"""A layer's experts over weights in the native CPU kernels' layout (expert_pack.py); else as experts.py.

Only the packs of chosen experts are read: those with few tokens by the decode kernels, those with many by panels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.cpu import linear as cpu_linear
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import INT8
from accelpatch.kernels.layouts.expert_pack import ExpertPack
from accelpatch.kernels.layouts.expert_stack import Stack, from_words
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.experts import cases as expert_cases
from accelpatch.kernels.ops.experts import experts, gradient
from accelpatch.kernels.ops.experts import reference as expert_reference
from accelpatch.kernels.ops.linear.packed_linear import NARROW
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "packed_experts"
SIZE = len(ExpertPack._fields)


def stack_of(pack: ExpertPack) -> Stack:
    """The same weights as a Stack."""
    return (Stack.of_int8 if pack.kind == INT8 else Stack.of_codes)(*pack.canonical())


def reference(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    """Unpack all, then the reference of `experts`."""
    return expert_reference.reference(x, ids, weights, *_stacks(given), *given[2 * SIZE :])


def _packs(given: tuple[Any, ...]) -> tuple[ExpertPack, ExpertPack]:
    return ExpertPack(*given[:SIZE]), ExpertPack(*given[SIZE : 2 * SIZE])


def _stacks(given: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    return tuple(tensor for pack in _packs(given) for tensor in stack_of(pack))


def spec(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    (up, down), activation = _packs(given), given[2 * SIZE]
    experts.check_routing(OP, x, ids, weights, activation)
    fits = up.k == x.shape[1] == down.n and up.n == 2 * down.k and len(up.data) == len(down.data)
    sizes = f"{len(up.data)} of {up.n} x {up.k}, {len(down.data)} of {down.n} x {down.k}"
    require(fits, OP, f"the packs do not fit together or x [T, {x.shape[1]}]: {sizes}")
    require(up.codes == down.codes in ("", "e2m1"), OP, f"codes are e2m1's or plain, not {up.codes} and {down.codes}")
    require(up.data.device == x.device, OP, f"x lies on {x.device}, the packs on {up.data.device}: move the module")
    return of_shape(
        len(up.data), up.k, down.k, x.dtype, 8 if up.kind == INT8 else 4, (up.group, down.group), up.codes or up.offset,
        tokens=len(x), chosen=ids.shape[1],
    )  # fmt: skip


def of_shape(
    number: int, width: int, inner: int, dtype: torch.dtype, bits: int, groups: tuple[int, int], offset: str, *,
    tokens: int = 1, chosen: int = 1,
) -> Spec:  # fmt: skip
    """The Spec of packed experts of this size, for planning before there are any."""
    sizes = {"M": tokens, "E": number, "H": width, "I": inner, "k": chosen}
    return Spec(OP, sizes, dtype, offset=offset, options={"bits": bits, "groups": groups})


def _why_not(spec: Spec, device: Device) -> str | None:
    if spec.dtype not in NARROW:
        return f"it computes in float32 and narrower, not in {spec.dtype}"
    width, inner, bits = spec.sizes["H"], spec.sizes["I"], spec.options["bits"]
    for n, k, group in zip((2 * inner, width), (width, inner), spec.options["groups"], strict=True):
        if reason := ExpertPack.why_not(n, k, group, spec.offset, bits):
            return reason
    return native_library.why_not(device)


def _cpu(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    (up, down), gate = _packs(given), given[2 * SIZE :]

    def expert(number: int, rows: Tensor) -> Tensor:
        inner = experts.gated(cpu_linear.product(rows, up.of(number)), *gate)
        return cpu_linear.product(inner, down.of(number))

    return experts.by_expert(x, ids, weights, len(up.data), expert)


def _torch(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    return experts.by_torch(x, ids, weights, *_stacks(given), *given[2 * SIZE :])


def _torch_why_not(spec: Spec, device: Device) -> str | None:
    return None if device.kind == "cpu" else f"a pack is the CPU's layout, and this is {device.name}"


@operation(OP)
def packed_experts(
    x: Tensor, ids: Tensor, weights: Tensor,
    gate_up: Tensor, kind: int, n: int, k: int, group: int, half_scales: bool, offset: str, codes: str,
    gate_up_bias: Tensor | None,
    down: Tensor, down_kind: int, down_n: int, down_k: int, down_group: int, down_half_scales: bool, down_offset: str,
    down_codes: str, down_bias: Tensor | None, activation: str = "silu", alpha: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """y[T, H] in x's dtype; as `experts`, with the fields of two ExpertPacks. Raises KernelError."""
    given = (
        gate_up, kind, n, k, group, half_scales, offset, codes, gate_up_bias,
        down, down_kind, down_n, down_k, down_group, down_half_scales, down_offset, down_codes, down_bias,
        activation, alpha, limit,
    )  # fmt: skip
    y: Tensor = dispatch.run(OP, spec, gate_up.device, (x, ids, weights, *given))
    return y


@packed_experts.register_fake
def _fake(x: Tensor, ids: Tensor, weights: Tensor, *given: Any, **named: Any) -> Tensor:
    return x.new_empty(x.shape)


@packed_experts.recompute
def _differentiable(x: Tensor, ids: Tensor, weights: Tensor, *given: Any) -> Tensor:
    up, down = _packs(given)
    gate = given[2 * SIZE :]
    expert = gradient.by_linears(gradient.of_pack(up), gradient.of_pack(down), lambda both: experts.gated(both, *gate))
    return experts.by_expert(x, ids, weights, len(up.data), expert)


def packed(stack: Stack, k: int) -> ExpertPack:
    """A Stack of codes as packs. k: its columns."""
    w, scale, offset, bias = stack
    assert scale is not None
    if stack.bits == 8:
        return ExpertPack.pack(w, scale, None, bias, bits=8)
    return ExpertPack.pack(from_words(w, k), scale, offset, bias, bits=4)


def cases() -> list[Case]:
    """The cases of `experts` that can be packed."""

    def of_packs(make: Any) -> Any:
        def made(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, ids, weights, *given = make(generator, dtype, device)
            up, down = Stack(*given[:4]), Stack(*given[4:8])
            return x, ids, weights, *packed(up, x.shape[1]), *packed(down, up.w.shape[1] // 2), *given[8:11]

        return made

    return [Case(case.id, of_packs(case.make)) for case in expert_cases.cases() if case.id.startswith(("w4", "w8-e3"))
            and not case.id.endswith("-tiles") and "nvfp4" not in case.id]  # fmt: skip


KERNELS = {
    OP: Kernel(
        packed_experts, reference, spec,
        {"cpu": Implementation(_cpu, _why_not), "torch": Implementation(_torch, _torch_why_not)}, cases,
    )
}  # fmt: skip
