"""Whether the code that a fast path stands for is still the code of its package.

A fast path computes what a class's `forward` was read to compute. It may run only while that is what would run: while
every function that `forward` reaches is the code object that the installed package defines at that qualified name. What
it reaches is read off the code itself, not listed by hand:

    methods      names in the code that are functions in the class or its bases, `__call__` and `__getattr__` included
    functions    of the same module, and of other modules of transformers and PEFT, one through the other
    of torch     functions by their dotted names, such as nn.functional.linear
    registries   entries of transformers' interfaces (attention, masks, experts) for the implementations in KEYS

A decorated function counts as the package's if every function around it is one of a package in PACKAGES too, but for
decorators that run a caller's code or change numbers (contextlib's, autocast). What others put into a class that this
package made of the original's, or into a class derived from it, counts as theirs. Nothing is hashed and no source is
compared, so that a new release of a package is its own from the start.
"""

from accelpatch.own_code.packages import is_of_a_package, is_ours
from accelpatch.own_code.reached import Reached
from accelpatch.own_code.tensors import unusual
from accelpatch.own_code.verdicts import (
    Snapshot,
    base_of,
    differs,
    has_overridden,
    is_others,
    look_at,
    may_differ,
    on_refresh,
    reached_by,
    refresh,
    why_not,
    why_not_in,
)

__all__ = [
    "Reached", "Snapshot", "base_of", "differs", "has_overridden", "is_of_a_package", "is_others", "is_ours", "look_at",
    "may_differ",
    "on_refresh", "reached_by", "refresh", "unusual", "why_not", "why_not_in",
]  # fmt: skip
