"""A site: one module of a model that a replacer may replace, with its shape and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from accelpatch.patching.stored import Stored

# Roles of linear layers inside the model; a rule for role `linear` matches all of them. The head has its own role.
LINEAR_ROLES = frozenset(
    {"linear", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2"}
)
# Attribute of a module that holds some columns of a weight (tensor parallel): K of the full weight.
WHOLE_K = "_accelpatch_whole_k"


@dataclass(frozen=True, eq=False)
class Site:
    """One module of a model, as the plan sees it.

    path, own_paths: dotted name, and every name under which the model holds the same module. module: the original; None
    in a detached plan. n, k: shape of the weight [N, K] (output and input features), None where there is no single
    matrix. bytes: size of the parameters that the module owns itself. token_bytes: bytes of those read to decode one
    token. tied: sites of other modules that share this module's weight; all of them are replaced together, or none.
    stored: the description of a weight that another library quantised, else None; n, k and dtype are then those of the
    float weight. adapted: names of parameters that PEFT changes at each call. model: the model that contains the
    module; None in a detached plan. tower: "vision" or "audio" for a module in such a tower of a multimodal model, else
    "".
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
    own_paths: tuple[str, ...] = ()
    tied: tuple[Site, ...] = ()
    stored: Stored | None = None
    adapted: tuple[str, ...] = ()
    model: nn.Module | None = None
    tower: str = ""

    @property
    def original(self) -> nn.Module:
        """The module itself; asserts that the site is not detached."""
        assert self.module is not None, f"{self.path}: the site is detached from its model"
        return self.module

    @property
    def whole_k(self) -> int | None:
        """K of the full weight, where tensor parallel gave the module only some of its columns; else `k`."""
        found: int | None = vars(self.original).get(WHOLE_K, self.k)
        return found

    @property
    def roles(self) -> frozenset[str]:
        """The role names in recipes that match this site."""
        own = {self.role, "linear"} if self.role in LINEAR_ROLES else {self.role}
        return frozenset(own | {self.tower} if self.tower else own)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every name of the module and of the modules tied to it."""
        return self.own_paths + tuple(path for site in self.tied for path in site.own_paths)

    def detached(self) -> Site:
        """A copy without the modules, so that keeping a plan keeps no weights alive."""
        return replace(self, module=None, model=None, tied=tuple(site.detached() for site in self.tied))
