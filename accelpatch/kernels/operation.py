"""Registers operations with torch, with a fast path around torch's dispatcher, whose overhead exceeds most kernels'
time.

Graphs, traces, gradients and tensor subclasses go through torch's custom operation; all other calls run its function
directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError

R = TypeVar("R")
PLAIN = (Tensor, nn.Parameter)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


class Operation(Generic[R]):
    """A torch custom operation. function: computes it, and its signature is the schema. custom: the registered
    operation.

    A backward pass that reaches it raises KernelError, unless `differentiate` or `recompute` gave it a gradient.
    """

    def __init__(self, name: str, function: Callable[..., R]):
        self.function = function
        self._direct: Any = None  # an autograd.Function, where `differentiate` made one
        self._of_torch: Callable[..., R] | None = None  # the same in torch's own operations, where `recompute` has it
        #: of a linear operation: (dy, args) -> the gradient of args[0], the input
        self.input_gradient: Callable[[Tensor, tuple[Any, ...]], Tensor] | None = None
        self.custom = torch.library.custom_op(f"accelpatch::{name}", function, mutates_args=())
        self.custom.register_autograd(_no_gradient)
        functools.update_wrapper(self, function)

    def register_fake(self, fake: Callable[..., R]) -> Callable[..., R]:
        """Register the fake kernel, which gives output shapes and dtypes; it gets every argument, by place."""
        self.custom.register_fake(with_defaults(fake, self.function))
        return fake

    def differentiate(
        self, backward: Callable[..., tuple[Any, ...]], kept: Callable[[tuple[bool, ...], int], bool] | None = None,
        input_gradient: Callable[[Tensor, tuple[Any, ...]], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Give the operation a gradient. backward: (needed, args, *gradients of the outputs) -> one gradient for each
        argument, None where `needed` is False; it runs in eager mode and inside of compiled graphs.

        kept: (needed, place of a tensor) -> whether it must be kept for the backward pass, else it is None in `args`.
        input_gradient: as the attribute.
        """

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            needed = _padded(ctx.needs_input_grad, len(inputs))[: len(inputs)]  # torch's operation adds one of its own
            dropped = [kept is not None and not kept(needed, place) for place in range(len(inputs))]
            rest = [None if drop else one for one, drop in zip(inputs, dropped, strict=True)]
            ctx.save_for_backward(*(one for one in rest if isinstance(one, Tensor)))
            ctx.rest = [_Saved if isinstance(one, Tensor) else one for one in rest]

        def run(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            saved = iter(ctx.saved_tensors)
            args = tuple(next(saved) if one is _Saved else one for one in ctx.rest)
            return backward(_padded(ctx.needs_input_grad, len(args)), args, *gradients)

        self._direct, self.input_gradient = _directly(self.function, keep, run), input_gradient
        self.custom.register_autograd(run, setup_context=keep)

    def recompute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give the operation the gradient of `function`, the same in torch's own operations, which is computed again in
        the backward pass: nothing but the arguments is kept for it.

        On a CPU `function` itself runs where a gradient is wanted, and keeps what torch keeps: it takes half the time.
        """

        def backward(needed: tuple[bool, ...], args: tuple[Any, ...], *gradients: Any) -> tuple[Any, ...]:
            place = next(one.device.type for one in args if isinstance(one, Tensor))
            with torch.enable_grad(), torch.autocast(place, enabled=False):
                own = [one.detach().requires_grad_() if need else one for one, need in zip(args, needed, strict=True)]
                made = function(*own)
            outputs = made if isinstance(made, tuple) else (made,)
            pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad]
            asked = [one for one, need in zip(own, needed, strict=True) if need]
            if not pairs:  # no expert was chosen, say
                return tuple(torch.zeros_like(one) if need else None for one, need in zip(args, needed, strict=True))
            made, given = [y for y, _ in pairs], [dy for _, dy in pairs]
            found = iter(torch.autograd.grad(made, asked, given, materialize_grads=True))
            return tuple(next(found) if need else None for need in needed)

        self.differentiate(backward)
        self._of_torch = function
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the function, directly or as torch's operation."""
        if torch.compiler.is_compiling() or kwargs or not _plain(args):
            result: R = self.custom._opoverload(*args, **kwargs)
            return result
        if not wants_gradient(one for one in args if isinstance(one, Tensor)):
            return self.function(*args)
        if self._of_torch is not None and args[0].device.type == "cpu":
            with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
                return self._of_torch(*args)
        differentiable: Callable[..., R] = self._direct or self.custom._opoverload
        return differentiable(*args)


def _directly(function: Callable[..., R], keep: Callable[..., None], run: Callable[..., Any]) -> Callable[..., R]:
    """`function` with its gradient, without torch's dispatcher, which takes longer on the host than most kernels on a
    device. keep, run: as `torch.library.register_autograd` takes them."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> R:
            keep(ctx, args, None)
            return function(*args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return run(ctx, *gradients)

    apply: Callable[..., R] = Direct.apply
    return apply


def with_defaults(function: Callable[..., R], like: Callable[..., Any]) -> Callable[..., R]:
    """`function` that gets every argument of `like`, by place: torch leaves out those that are equal to defaults."""
    signature = inspect.signature(like)

    def by_place(*args: Any, **kwargs: Any) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*bound.args)

    return by_place


def _padded(needed: tuple[bool, ...], size: int) -> tuple[bool, ...]:
    """False for each argument that was left out."""
    return needed + (False,) * (size - len(needed))


class _Saved:
    """Stands in a list of arguments for a tensor that autograd keeps."""


def operation(name: str) -> Callable[[Callable[..., R]], Operation[R]]:
    """Decorator: register a function as the operation accelpatch::name."""
    return functools.partial(Operation, name)


def is_eager() -> bool:
    """Whether torch is neither tracing, transforming nor intercepting operations now."""
    return not (_modes() or _transforms() is not None or torch._C._get_tracing_state() is not None)


def wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether what is computed from these now can be asked for a gradient."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether torch's dispatcher can be bypassed: eager mode, plain tensors with data."""
    return is_eager() and not any(
        isinstance(value, Tensor) and (type(value) not in PLAIN or value.is_meta) for value in args
    )


NO_GRADIENT = (
    "accelpatch's kernels have no gradient for this: call accelpatch.unpatch(model) before training it, "
    "or run the patched model under torch.inference_mode()"
)


def _no_gradient(ctx: Any, *gradients: Any) -> Any:
    raise KernelError(NO_GRADIENT)
