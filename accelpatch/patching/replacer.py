"""The interface of a replacer: propose without side effects, then build while the original stays."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from accelpatch.device import Device
from accelpatch.errors import PlanError
from accelpatch.patching.site import Site

EVERY_CHILD = frozenset({"*"})


@dataclass(frozen=True)
class Choice:
    """What a replacer would do at a site.

    kernel: the implementation that would run. bytes_before, bytes_after: weight bytes read to decode one token.
    resident_after: bytes that the replacement holds in memory. detail: data for the replacer's own `build`, such as the
    group size. note: a remark for the user, such as why a faster kernel is not chosen; printed once per plan. fused:
    for a layer, whether decode steps run it fused (else the note is why not); None for all other sites. libraries:
    names of the device libraries that it launches, which a patch builds before it builds anything of the model. slower:
    why it would be slower than the original; it is then taken only for a weight that a checkpoint has in this format,
    which has no original. spec: a kernel's description of a call (kernels/spec.py), for `Plan.why`; None for none.
    """

    kernel: str
    bytes_before: int
    bytes_after: int
    resident_after: int
    detail: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    fused: bool | None = None
    libraries: tuple[str, ...] = ()
    slower: str = ""
    spec: Any = None


@dataclass(frozen=True)
class Replaced:
    """What replaces a site, for the replacer of its parent: the replacer's name, the kernel that would run, and whether
    fused layers read what it makes."""

    replacer: str
    kernel: str
    fusable: bool = False


@dataclass(frozen=True)
class Reason:
    """Why a site is not replaced."""

    text: str


class Replacer(ABC):
    """One way to replace a module; subclass it and register it with `@accelpatch.replacer`.

    name: the name that recipes use. options: option name -> accepted types. consumes: roles of children whose own
    rules still apply when this replaces their parent (`EVERY_CHILD`: all). ties: whether it can replace several
    modules that share a weight. rounds: whether the original weights must be kept for unpatch. fuses: whether a
    fused layer is made of the replacement, which is verified again as a whole. fusable: whether fused layers read
    its weight. smooths: whether `build` takes the smoothing of its group. whole: whether it takes a module with all
    that is in it: no rule applies to what is inside. takes_stored: whether it takes modules whose weight another
    library quantised itself; in place of all others their own format's does. by_token: whether only the first
    output counts (attention weights, say, are not made), and that not for padding. stands_for_code: whether it was
    made for the code of transformers and torch, so that a module whose class runs other code stays; so it is of all
    built-in ones.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    consumes: ClassVar[frozenset[str]] = frozenset()
    ties: ClassVar[bool] = False
    rounds: ClassVar[bool] = True
    fuses: ClassVar[bool] = False
    fusable: ClassVar[bool] = False
    smooths: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    takes_stored: ClassVar[bool] = False
    by_token: ClassVar[bool] = False
    stands_for_code: bool = False

    @abstractmethod
    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        """Say what would be done at `site`, or why not; must not allocate or change anything."""

    def complete(self, site: Site, choice: Choice, replaced: Mapping[str, Replaced | None], device: Device) -> Choice:
        """The final Choice of a site whose children, or others, decide what it can be. Pure.

        replaced: dotted name of every site of the model -> what replaces it; None: it stays.
        """
        return choice

    @abstractmethod
    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        """Make the replacement; must not change the original or the model.

        stats: a quant.smoothing.SiteStatistics, or None.
        """

    def observer(self, choice: Choice) -> str | None:
        """What `build` needs of the site's input: "channels" (quant.calibration: figures of each, of the float model),
        "hessian" (quant.hessian: second moments, behind layers that are rounded already), or None."""
        return None

    def weight(self, choice: Choice, parts: Mapping[str, Any]) -> Any:
        """The quantised weight of the tensors that a checkpoint has of it, by name. Raises KernelError."""
        raise PlanError(f"{self.name} cannot be restored from a checkpoint")

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        """Make the replacement from a quantised weight of a checkpoint. Raises PlanError, or KernelError where the
        weight does not fit the site."""
        raise PlanError(f"{self.name} cannot be restored from a checkpoint")

    def parts(self, site: Site, names: Iterable[str]) -> list[str] | None:
        """Of the tensors in a checkpoint those that `restore` takes, by their names in the site; None: the parts of a
        quantised weight."""
        return None

    def prefetchable(self, site: Site, choice: Choice, built: nn.Module) -> Choice:
        """The final Choice once `built` exists, for replacements that depend on the weight's values."""
        return choice

    def build_tied(self, site: Site, tied: Site, built: nn.Module) -> nn.Module:
        """Make the replacement of a module tied to `site`; it shares the weight of `built`."""
        raise PlanError(f"{self.name} cannot share a weight between {site.path} and {tied.path}")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise PlanError for an option that is unknown or of the wrong type."""
        for key, value in options.items():
            if key not in self.options:
                near = difflib.get_close_matches(key, self.options, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; it has: {', '.join(self.options) or 'none'}"
                raise PlanError(f"{self.name} has no option {key}{hint}")
            accepted = self.options[key]
            if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
                words = " or ".join("null" if kind is type(None) else kind.__name__ for kind in accepted)
                raise PlanError(f"{self.name}: option {key} is {value!r}, expected {words}")
