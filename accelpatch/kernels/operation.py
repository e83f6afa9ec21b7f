"""Registers operations with torch, with a fast path around torch's dispatcher, whose overhead exceeds most kernels'
time.

Graphs, traces, gradients and tensor subclasses go through torch's custom operation; all other calls run its function
directly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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

    It has no gradient: a backward pass that reaches it raises KernelError.
    """

    def __init__(self, name: str, function: Callable[..., R]):
        self.function = function
        self.custom = torch.library.custom_op(f"accelpatch::{name}", function, mutates_args=())
        self.custom.register_autograd(_no_gradient)
        functools.update_wrapper(self, function)

    def register_fake(self, fake: Callable[..., R]) -> Callable[..., R]:
        """Register the fake kernel, which gives output shapes and dtypes; it gets every argument, by place."""
        signature = inspect.signature(self.function)

        def by_place(*args: Any, **kwargs: Any) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return fake(*bound.args)

        self.custom.register_fake(by_place)
        return fake

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the function, directly or as torch's operation."""
        if torch.compiler.is_compiling() or kwargs or not _plain(args):
            result: R = self.custom._opoverload(*args, **kwargs)
            return result
        return self.function(*args)


def operation(name: str) -> Callable[[Callable[..., R]], Operation[R]]:
    """Decorator: register a function as the operation accelpatch::name."""
    return functools.partial(Operation, name)


def is_eager() -> bool:
    """Whether torch is neither tracing, transforming nor intercepting operations now."""
    return not (_modes() or _transforms() is not None or torch._C._get_tracing_state() is not None)


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether torch's dispatcher can be bypassed: eager mode, plain tensors with data, no gradient needed."""
    if not is_eager():
        return False
    differentiable = torch.is_grad_enabled()
    for value in args:
        if isinstance(value, Tensor) and (
            type(value) not in PLAIN or value.is_meta or (differentiable and value.requires_grad)
        ):
            return False
    return True


NO_GRADIENT = (
    "accelpatch's kernels have no gradient: call accelpatch.unpatch(model) before training it, "
    "or run the patched model under torch.inference_mode()"
)


def _no_gradient(ctx: Any, *gradients: Any) -> Any:
    raise KernelError(NO_GRADIENT)


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, trained: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KernelError(NO_GRADIENT)


def refusing_gradient(y: Tensor, trained: Tensor) -> Tensor:
    """y without its graph; a backward pass that needs the gradient of `trained` through it raises KernelError."""
    refusing: Tensor = _Refusing.apply(y, trained)
    return refusing
