"""A kernel's operation as torch knows it, with a short way past torch's dispatcher, which takes longer than most do.

Graphs, traces, gradients and tensors that are not plain ones go through torch's custom operation; all other calls run
its function at once.
"""

from __future__ import annotations

import functools
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
    """function: what the operation computes, whose signature torch reads. custom: as torch's operation.

    It has no gradient: a backward pass that reaches it raises KernelError.
    """

    def __init__(self, name: str, function: Callable[..., R]):
        self.function = function
        self.custom = torch.library.custom_op(f"accelpatch::{name}", function, mutates_args=())
        self.custom.register_autograd(_no_gradient)
        functools.update_wrapper(self, function)

    def register_fake(self, fake: Callable[..., R]) -> Callable[..., R]:
        """Says what shapes and dtypes come out, for graphs."""
        self.custom.register_fake(fake)
        return fake

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """As the function."""
        if torch.compiler.is_compiling() or kwargs or not _plain(args):
            result: R = self.custom._opoverload(*args, **kwargs)
            return result
        return self.function(*args)


def operation(name: str) -> Callable[[Callable[..., R]], Operation[R]]:
    """Makes a function the operation accelpatch::name."""
    return functools.partial(Operation, name)


def is_eager() -> bool:
    """Whether nobody traces, transforms or intercepts what torch does now."""
    return not (_modes() or _transforms() is not None or torch._C._get_tracing_state() is not None)


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether nothing but the numbers of these arguments is wanted."""
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
    """y, made without a graph; a backward pass that wants the gradient of `trained` through it raises KernelError."""
    refusing: Tensor = _Refusing.apply(y, trained)
    return refusing
