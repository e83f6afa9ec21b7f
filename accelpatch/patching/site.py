"""A site: one module of a model that a replacer may replace, with its shape and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from accelpatch.patching.stored import Stored

# Roles of products with one weight matrix inside the model; a rule for role `linear` takes them all. The head is apart.
LINEAR_ROLES = frozenset(
    {"linear", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2"}
)
WHOLE_K = "_accelpatch_whole_k"  # attribute of a module with some columns of a weight: how many the whole has


@dataclass(frozen=True, eq=False)
class Site:
    """One module of a model, as the plan sees it.

    path, places: dotted name, and every name under which the model holds the same module. module: the original; None in
    a detached plan. n, k: shape of the weight [N, K] (output and input features), None where there is no single matrix.
    bytes: size of the parameters that the module owns itself. token_bytes: bytes of those read to decode one token.
    tied: sites of other modules that share this module's weight; all of them are replaced together, or none. stored:
    what is known of a weight that another library quantised; n, k and dtype are then those of the float weight.
    adapted: names of parameters that adapters around the module change while it runs. model: what the module is part
    of; None in a detached plan. part: the tower of a multimodal model that it is of ("vision", "audio"), or "".
    """

    path: str
    module: nn.Module | None
    role: str
    class_names: tuple[str, ...]
    n: int | None = None
    k: int | None = None
    bytes: int = 0
    token_bytes: int = 0
    dtype: str = ""
    places: tuple[str, ...] = ()
    tied: tuple[Site, ...] = ()
    stored: Stored | None = None
    adapted: tuple[str, ...] = ()
    model: nn.Module | None = None
    part: str = ""

    @property
    def original(self) -> nn.Module:
        """The module itself; asserts that the site is not detached."""
        assert self.module is not None, f"{self.path}: the site is detached from its model"
        return self.module

    @property
    def whole_k(self) -> int | None:
        """K of the whole weight, where tensor parallel left the module a part of its columns; else `k`."""
        found: int | None = vars(self.original).get(WHOLE_K, self.k)
        return found

    @property
    def roles(self) -> frozenset[str]:
        """The role names in recipes that match this site."""
        own = {self.role, "linear"} if self.role in LINEAR_ROLES else {self.role}
        return frozenset(own | {self.part} if self.part else own)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the site and of those tied to it."""
        return self.places + tuple(path for site in self.tied for path in site.places)

    def detached(self) -> Site:
        """A copy without the modules, so that keeping a plan keeps no weights alive."""
        return replace(self, module=None, model=None, tied=tuple(site.detached() for site in self.tied))
