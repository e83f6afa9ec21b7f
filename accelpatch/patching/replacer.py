"""The interface of a replacer: `propose` has no side effects, and `build` leaves the original as it is."""

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
    resident_after: bytes of the replacement in memory. detail: data for the replacer's own `build`, such as the
    group size. note: a remark for the user, such as why a faster kernel is not chosen; printed once per plan. fused:
    for a layer, whether decode steps run it fused (else the note is why not); None for all other sites. libraries:
    names of the device libraries that it launches, which a patch compiles before it changes anything. slower: why it
    would be slower than the original ("": it is not); such a choice is used only for a weight that a checkpoint has in
    this format, which has no original. spec: a kernel's description of a call (kernels/spec.py), for `Plan.why`, or
    None.
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
    """What replaces a site, as `Replacer.complete` of another site sees it.

    fusable: whether fused layers read the replacement's weight.
    """

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
    fused layer is made from the replacement, which is verified again as a whole. fusable: whether fused layers read
    its weight. smooths: whether `build` applies the smoothing of its group. whole: whether it replaces a module
    together with everything inside it, so that no rule applies there. takes_stored: whether `propose` accepts
    modules whose weight another library quantised; for all other replacers such a module goes to the replacer of its
    own format. by_token: whether verification compares only the first output (an attention may omit the attention
    weights, say), without padding. stands_for_code: whether it was written for the code of transformers and torch,
    so that a module whose class runs other code is kept; true of all built-in ones.
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
        """What would be done at `site`, or why not; must not allocate or change anything."""

    def complete(self, site: Site, choice: Choice, replaced: Mapping[str, Replaced | None], device: Device) -> Choice:
        """The Choice of a site once all sites have theirs, for one that depends on its children's or others'. Pure.

        replaced: dotted name of every site of the model -> what replaces it; None: it stays.
        """
        return choice

    @abstractmethod
    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        """Make the replacement; must not change the original or the model.

        stats: a quant.smoothing.SiteStatistics, or None.
        """

    def observer(self, choice: Choice) -> str | None:
        """Which statistics of the site's input `build` needs: "channels" (quant.calibration: figures of each channel,
        in the float model), "hessian" (quant.hessian: second moments, with the layers before it rounded), or None."""
        return None

    def weight(self, choice: Choice, parts: Mapping[str, Any]) -> Any:
        """The quantised weight, from its tensors in a checkpoint by name. Raises KernelError."""
        raise PlanError(f"{self.name} cannot be restored from a checkpoint")

    def restore(self, site: Site, choice: Choice, saved: Any) -> nn.Module:
        """Make the replacement from a quantised weight of a checkpoint. Raises PlanError, or KernelError where the
        weight does not fit the site."""
        raise PlanError(f"{self.name} cannot be restored from a checkpoint")

    def parts(self, site: Site, names: Iterable[str]) -> list[str] | None:
        """The names (relative to the site) of those checkpoint tensors that `restore` takes; None: it takes a quantised
        weight, made from that weight's tensors."""
        return None

    def finalize(self, site: Site, choice: Choice, built: nn.Module) -> Choice:
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
