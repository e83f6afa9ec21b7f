"""The errors that accelpatch raises on purpose; each message says what to do next."""

from __future__ import annotations

# What code of others raises on what it does not take: nearly all, but neither interrupts nor an exit.
FOREIGN = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError,
    OSError,
)  # fmt: skip


class AccelpatchError(Exception):
    """Base of every error that a user's input or machine can cause."""


class RecipeError(AccelpatchError):
    """A recipe that cannot be read, with the place of the mistake.

    ``line`` and ``column`` count from 1; both are None where the mistake has no place.
    """

    def __init__(self, message: str, *, source: str = "recipe", line: int | None = None, column: int | None = None):
        place = source if line is None else f"{source}:{line}:{column}"
        super().__init__(f"{place}: {message}")
        self.source, self.line, self.column = source, line, column


class PlanError(AccelpatchError):
    """A recipe that does not fit the model: a rule without a match, two owners of one parameter, a split tie."""


class PatchError(AccelpatchError):
    """A model that cannot be patched or unpatched in its present state, or a site that failed while it was replaced."""


class VerifyError(PatchError):
    """A replacement whose error is over the bound of its recipe, where the recipe says that this is an error."""


class LoadError(AccelpatchError):
    """A model that cannot be found, read or trusted."""


class KernelError(AccelpatchError):
    """A kernel that cannot run here, with every reason; or one that was given arguments outside its limits."""


class CacheError(AccelpatchError):
    """A cache folder that is not private to the user, or not writable."""
