"""accelpatch's exceptions; each message says what to do next."""

from __future__ import annotations

# The exceptions that other libraries raise on input that they do not support.
FOREIGN = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError,
    OSError,
)  # fmt: skip


class AccelpatchError(Exception):
    """Base class of all errors that a user's input or machine can cause."""


class ArgumentError(AccelpatchError, TypeError):
    """An argument is of another type than a function takes; the message says what it takes."""


class RecipeError(AccelpatchError):
    """A recipe is not valid. ``source``, ``line`` and ``column`` say where.

    Line and column count from 1; both are None where the mistake has no place.
    """

    def __init__(self, message: str, *, source: str = "recipe", line: int | None = None, column: int | None = None):
        place = source if line is None else f"{source}:{line}:{column}"
        super().__init__(f"{place}: {message}")
        self.source, self.line, self.column = source, line, column


class PlanError(AccelpatchError):
    """A recipe does not fit the model: a rule matches nothing, a parameter has two owners, or a tie would be split."""


class PatchError(AccelpatchError):
    """A model cannot be patched or unpatched in its present state, or replacing one of its sites failed."""


class VerifyError(PatchError):
    """A replacement's error is over its bound, and the recipe says ``on_failure: error``."""


class LoadError(AccelpatchError):
    """A model cannot be found or read, or its checkpoint is of a form that is not trusted."""


class SaveError(AccelpatchError):
    """A checkpoint cannot be written; what was there before is as it was."""


class KernelError(AccelpatchError):
    """No implementation of an operation can run here (the message lists every reason), or its arguments do not fit."""


class LibraryError(KernelError):
    """A kernel library cannot be built or loaded: the library is at fault, and nothing that is computed with it."""


class CompileError(KernelError):
    """A kernel cannot be compiled for this GPU; where no implementation is forced, another one runs in its place."""


class CacheError(AccelpatchError):
    """The cache folder is not private to the user, or not writable."""


class TrainingError(AccelpatchError):
    """A fine-tuning run cannot begin or go on; whole checkpoints that it wrote are kept, and the message says where."""


class ServingError(AccelpatchError):
    """A server cannot start: its address, its key, its model or its engine does not fit. Nothing was loaded."""
