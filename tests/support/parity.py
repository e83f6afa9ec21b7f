"""The one parity helper: run an operation on poisoned memory and judge it by the float rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def name(value: Any) -> str:
    """Test ids: float32 for torch.float32, 3x65 for a shape."""
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return str(value).removeprefix("torch.")


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch.empty and its kind give is full of NaN (integers: their largest value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_parity(op: str, args: Sequence[Any], implementation: str = "torch") -> tuple[Tensor, ...]:
    """Run `op` by `implementation` (torch: the one in plain torch, whatever its name) and give its outputs.

    Asserts the float rule for each output, that the implementation ran, that no input changed, and that outputs are
    contiguous.
    """
    before = [value.clone() if isinstance(value, Tensor) else value for value in args]
    if implementation == "torch" and not dispatch.kernel(op).composed:
        implementation = tuple(dispatch.kernel(op).implementations)[-1]
    composed = dispatch.kernel(op).composed and implementation not in dispatch.kernel(op).implementations
    counted = "operations" if composed else implementation  # whose parts are forced
    ran = dispatch.calls[op, counted]
    with poisoned(), dispatch.forced(implementation):
        outputs = parity.as_tuple(dispatch.kernel(op).op(*args))
    assert dispatch.calls[op, counted] == ran + 1, f"{implementation} did not run"
    for index, found in enumerate(parity.check(op, args, outputs)):
        assert found.ok, f"{op} output {index}: {found.reason}"
    for was, now in zip(before, args, strict=True):
        assert not isinstance(was, Tensor) or torch.equal(bits(was), bits(now)), "an input was written to"
    assert all(output.is_contiguous() for output in outputs)
    return outputs


def bits(values: Tensor) -> Tensor:
    """The same bytes as integers, so that NaN equals itself and 0 does not equal -0."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(sizes[values.element_size()])


def strided(values: Tensor) -> Tensor:
    """An equal tensor with a gap after each element and an offset before the first; the gaps hold junk."""
    junk = float("nan") if values.is_floating_point() else 111
    room = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 3), junk, dtype=values.dtype, device=values.device)
    view = room[..., 3::2]
    view.copy_(values)
    return view


def transposed(values: Tensor) -> Tensor:
    """An equal tensor whose first dimension is the fastest in memory."""
    return values.movedim(0, -1).contiguous().movedim(-1, 0)
