"""A site: one place in a model that a replacer may take, with its shapes and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

# Roles of products with one weight matrix inside the model; a rule for role `linear` takes them all. The head is apart.
LINEAR_ROLES = frozenset(
    {"linear", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2"}
)


@dataclass(frozen=True, eq=False)
class Site:
    """One module of a model, as the plan sees it.

    path, places: dotted name, and every name under which the model holds the same module.
    module: the original; None once a plan has been detached from its model.
    n, k: rows and columns of the weight `[N, K]` (features out and in), None where there is no single matrix.
    bytes: bytes of the parameters that the module owns itself. token_bytes: those read to decode one token.
    tied: sites of other modules that share this module's weight; they are replaced together with it or not at all.
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

    @property
    def original(self) -> nn.Module:
        """The module itself, for replacers; a detached site has none."""
        assert self.module is not None, f"{self.path}: the site is detached from its model"
        return self.module

    @property
    def roles(self) -> frozenset[str]:
        """The words by which a rule may name this site's role."""
        return frozenset({self.role, "linear"}) if self.role in LINEAR_ROLES else frozenset({self.role})

    @property
    def paths(self) -> tuple[str, ...]:
        """Every name of the site and of those tied to it."""
        return self.places + tuple(path for site in self.tied for path in site.places)

    def detached(self) -> Site:
        """The same facts without the module, so that keeping a plan keeps no weights."""
        return replace(self, module=None, tied=tuple(site.detached() for site in self.tied))
