"""`@accelpatch.implementation`: a function of one's own as an implementation of one of accelpatch's operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from accelpatch.device import Device
from accelpatch.errors import ArgumentError
from accelpatch.kernels import added, dispatch
from accelpatch.kernels.added import SHORT, Added, WhyNot
from accelpatch.kernels.choice import Range
from accelpatch.kernels.spec import Implementation, Spec

Run = TypeVar("Run", bound=Callable[..., torch.Tensor])
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def implementation(
    op: str, *, name: str, why_not: WhyNot | None = None, rows: Range | None = None
) -> Callable[[Run], Run]:  # fmt: skip
    """Decorator: the function implements an operation, under a name, from now on in this process.

        @accelpatch.implementation("linear", name="my_gemv", why_not=lambda spec, device: ...)
        def my_gemv(x, w, bias=None): ...

    op: "linear" (y[..., N] = x[..., K] @ w[N, K]^T + bias[N] in a float dtype, x of any shape) or an operation of
    `accelpatch.kernels.dispatch.TABLE`, whose arguments it takes and whose result it returns. why_not(spec, device):
    why it cannot run a call, or None; `spec` has sizes M, N, K and the dtype, and the device may be one that is not
    here. rows: (from, up to) rows of x for which it goes before ours, up to None: no end. Without, it runs where a
    recipe names it (`replace: gemv`, `options: {kernel: my_gemv}`) and within `dispatch.forced`.

    It launches on torch's current stream, writes into none of its arguments, and may get views with strides and a bias
    of another float dtype than x. Raises ArgumentError for an operation that there is not, or a name that cannot be in
    a recipe or is one of ours.
    """
    known = SHORT.get(op, op)
    if known not in dispatch.TABLE:
        raise ArgumentError(f"there is no operation {op!r}; there are {', '.join((*SHORT, *dispatch.TABLE))}")
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"the implementation's name is {name!r}: use lower-case letters, digits and _")
    if name in (*dispatch.kernel(known).implementations, "reference", "operations"):
        raise ArgumentError(f"{name} is an implementation of {known} that accelpatch has: give yours another name")
    if not dispatch.kernel(known).registered:
        raise ArgumentError(f"{known} writes into its arguments, so that its implementations cannot be added to")

    def reasoned(spec: Spec, device: Device) -> str | None:
        return None if why_not is None else why_not(spec, device)

    def decorate(run: Run) -> Run:
        added.add(known, name, Added(Implementation(run, reasoned), rows))
        dispatch.forget()
        return run

    return decorate
