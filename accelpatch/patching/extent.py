"""How much of a patch is verified: `verify=` of patch and load, and --verify.

Sites are of one kind if they have the same replacer, kernel, shape, role, rule and classes.

full   Every replacement and every fused layer, on every sample, all rows of all outputs.
auto   Every replacement and every fused layer, with two reductions. If the samples are our own, only the first site of
       a kind runs all of them; the others run one sample, a row of tokens. The float64 reference of a linear layer
       covers 8 rows, and after the first of a kind only every fourth block of output features, starting one block
       further at each layer. Of a checkpoint, whose weights are protected by digests, only the first replacement of
       each kind is checked; and it is `quick` if the code that computes has the digest under which the checkpoint was
       verified before it was saved.
quick  The first of each kind, both of replacements and of fused layers.
off    Nothing.

If the first of a kind is over its bound, every other one of that kind is checked as fully as the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelpatch.errors import ArgumentError
from accelpatch.patching.entry import Entry
from accelpatch.patching.plan import Plan

AUTO, FULL, QUICK, OFF = "auto", "full", "quick", "off"
ROWS, EVERY = 8, 4  # rows, and one block of output features of so many, that a linear layer's reference covers
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
    """What a level means for one patch. loaded: whether the model comes from a checkpoint of replaced modules."""

    level: str = AUTO
    loaded: bool = False

    @property
    def verifies(self) -> bool:
        """Whether anything is verified."""
        return self.level != OFF

    @property
    def every_site(self) -> bool:
        """Whether every replacement is checked, not only the first of each kind."""
        return self.level in (FULL, OFF) or (self.level == AUTO and not self.loaded)

    @property
    def whole_model(self) -> bool:
        """Whether the whole patched model is run and compared with its outputs before. For a loaded model those
        are the outputs of its replaced modules, before layers are fused."""
        return not (self.level == QUICK and self.loaded)

    def checked_part(self, first: bool, number: int) -> dict[str, int]:
        """Which part of a linear layer's calls is compared with the float64 reference: keywords of
        kernels.check.while_running.checked.

        first: whether the site is the first of its kind. number: its number among those of its kind.
        """
        return {} if self.level == FULL else {"rows": ROWS, "every": 1 if first else EVERY, "first": number}

    @property
    def every_layer(self) -> bool:
        """Whether every fused layer is checked, not only the first of each kind."""
        return self.level != QUICK

    def chosen(self, calls: Sequence[Any], first: bool, own: bool) -> Any:
        """The recorded calls of a site (or samples, if there is one call each) that it is checked on.

        first: whether the site is the first of its kind. own: whether the samples are our own; the last but one of
        these is one row of tokens.
        """
        return calls if self.level == FULL or first or not own else calls[-2:-1] or calls


UNVERIFIED = Extent(OFF)


def first_of_kind(plan: Plan) -> dict[str, str]:
    """Path of each replaced site -> path of the first site of its kind."""
    first: dict[Any, str] = {}
    found = {}
    for entry in plan.replaced:
        kernel = None if entry.choice is None else entry.choice.kernel
        site = entry.site
        kind: Any = (entry.replacer, site.class_names, site.n, site.k, site.role, kernel, id(entry.rule))
        found[entry.site.path] = first.setdefault(kind, entry.site.path)
    return found


def is_layer(entry: Entry) -> bool:
    """Whether the site is a layer that may be fused; fused layers are verified after all sites."""
    return entry.replacer is not None and entry.replacer.fuses
