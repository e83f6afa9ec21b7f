"""How much of a patch is verified: `verify=` of patch and load, and --verify.

full   each replacement and each fused layer, on every sample, all rows of all outputs.
auto   the same; but of our own samples the first of a kind alone (same replacer, kernel, shape and classes) runs all.
       The others run one row of tokens. Of a linear layer's calls a part is compared with the float64 reference: 8
       rows, and after the first of a kind every fourth block of its outputs, the next block from layer to layer. Of a
       checkpoint, whose weights are compared with their digests, kernels are checked on the first of each kind; as
       `quick` where the digest of what computes is the one under which it was verified before it was saved.
quick  the first of each kind, of replacements and of fused layers.
off    nothing.

Where the first of a kind is over its bound, each other one of the kind is checked as the first was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelpatch.errors import ArgumentError
from accelpatch.patching.entry import Entry
from accelpatch.patching.plan import Plan

AUTO, FULL, QUICK, OFF = "auto", "full", "quick", "off"
ROWS, EVERY = 8, 4
LEVELS = (AUTO, FULL, QUICK, OFF)


def level_of(verify: bool | str) -> str:
    """The level of `verify=`, where True is "auto" and False "off". Raises ArgumentError for anything else."""
    if isinstance(verify, bool):
        return AUTO if verify else OFF
    if verify not in LEVELS:
        raise ArgumentError(f"verify is {verify!r}; it is True, False, or one of {', '.join(LEVELS)}")
    return verify


@dataclass(frozen=True)
class Extent:
    """A level for a model that was patched in memory, or loaded from a checkpoint of replaced modules."""

    level: str = AUTO
    loaded: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is verified."""
        return self.level != OFF

    @property
    def sites(self) -> bool:
        """Whether each replacement is checked, and not the first of each kind alone."""
        return self.level in (FULL, OFF) or (self.level == AUTO and not self.loaded)

    @property
    def whole(self) -> bool:
        """Whether the whole model is compared with what it was, of which one that was loaded has only the modules."""
        return not (self.level == QUICK and self.loaded)

    def part(self, first: bool, place: int) -> dict[str, int]:
        """What of a linear layer's calls is compared with the float64 reference: the keywords of the context that
        checks.

        first: whether the site is the first of its kind. place: its number among those of its kind.
        """
        return {} if self.level == FULL else {"rows": ROWS, "every": 1 if first else EVERY, "first": place}

    @property
    def layers(self) -> bool:
        """Whether each fused layer is checked, and not the first of each kind alone."""
        return self.level != QUICK

    def chosen(self, calls: Sequence[Any], first: bool, own: bool) -> Any:
        """Those of the recorded calls (or of the samples, one each) that a site is checked on. first: whether it is the
        first of its kind. own: whether the samples are our own: of those the last but one is one row of tokens."""
        return calls if self.level == FULL or first or not own else calls[-2:-1] or calls


UNVERIFIED = Extent(OFF)


def first_of_kind(plan: Plan) -> dict[str, str]:
    """Path of each replaced site -> path of the first one of its kind."""
    first: dict[Any, str] = {}
    found = {}
    for entry in plan.replaced:
        kernel = None if entry.choice is None else entry.choice.kernel
        site = entry.site
        kind: Any = (entry.replacer, site.class_names, site.n, site.k, site.role, kernel, id(entry.rule))
        found[entry.site.path] = first.setdefault(kind, entry.site.path)
    return found


def is_layer(entry: Entry) -> bool:
    """Whether a layer is replaced, whose steps are checked after all else."""
    return entry.replacer is not None and entry.replacer.fuses
