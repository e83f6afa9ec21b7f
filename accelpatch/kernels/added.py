"""Implementations that a user adds to operations, by `@accelpatch.implementation`, for the life of the process.

Each is checked as ours are: `why_not` is asked before it runs, verification holds it to the float rule, and where it
cannot run a call the next one of the operation's order does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import Tensor

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.choice import Range, rows_of
from accelpatch.kernels.compiling.file_kernel import FileKernel
from accelpatch.kernels.spec import Implementation, Result, Spec

WhyNot = Callable[[Spec, Device], str | None]
#: names that a user writes -> operations of dispatch.TABLE
SHORT = {"linear": "float_linear"}
PREFERRED = "prefer"  # option of a Spec: the implementation that a recipe names for a site


@dataclass(frozen=True)
class Added:
    """rows: of x, for which it is taken before ours; None: only where it is named."""

    implementation: Implementation
    rows: Range | None

    @property
    def run(self) -> Callable[..., Result]:
        """The function that was decorated."""
        return self.implementation.run

    def files(self) -> Iterator[Path]:
        """What it is made of: the Python file, and the kernel files of its module, with their headers."""
        home: ModuleType | None = sys.modules.get(self.run.__module__)
        if home is None or getattr(home, "__file__", None) is None:
            return
        yield Path(str(home.__file__))
        for value in vars(home).values():
            if isinstance(value, FileKernel):
                yield from value.file.files()


_added: dict[str, dict[str, Added]] = {}


def add(op: str, name: str, added: Added) -> None:
    """Add an implementation, in the place of one of the same name."""
    _added.setdefault(op, {})[name] = added


def of(op: str) -> Mapping[str, Added]:
    """The implementations that were added to an operation, by name."""
    return _added.get(op, {})


def first(op: str, spec: Spec) -> list[str]:
    """Those that are tried before ours: the one that the Spec names, then those that are for so many rows."""
    named = str(spec.options.get(PREFERRED, ""))
    rows = spec.sizes.get(rows_of(op), 0)
    fitting = [name for name, one in of(op).items() if one.rows and one.rows[0] <= rows <= (one.rows[1] or rows)]
    return [*([named] if named in of(op) else []), *fitting]


def check_result(op: str, name: str, found: Sequence[Tensor], due: Sequence[Tensor]) -> None:
    """Raise KernelError where an implementation returned another shape or dtype than the operation has."""
    if [(one.shape, one.dtype) for one in found] != [(one.shape, one.dtype) for one in due]:
        say = [" and ".join(f"{one.dtype} {list(one.shape)}" for one in each) or "nothing" for each in (found, due)]
        raise KernelError(f"{name} returned {say[0]}, and {op} is {say[1]}: return what the operation does")


def forget() -> None:
    """Take all of them out again."""
    _added.clear()
