"""The decision about one site of a plan, and the check that no parameter has two owners."""

from __future__ import annotations

from dataclasses import dataclass, replace

from accelpatch.errors import PlanError
from accelpatch.patching.replacer import Choice, Replacer
from accelpatch.patching.site import Site
from accelpatch.recipe.recipe import Rule
from accelpatch.report import SiteRecord


@dataclass(frozen=True, eq=False)
class Entry:
    """The decision about one site: the rule's replacer and its choice, or the reason why the site stays.

    inside: the sites inside a module whose replacer is `whole`; they have no entries themselves.
    """

    site: Site
    rule: Rule | None
    replacer: Replacer | None = None
    choice: Choice | None = None
    reason: str | None = None
    failed: bool = False
    inside: tuple[Site, ...] = ()

    def kept(self, reason: str, *, failed: bool = False) -> Entry:
        """A copy of this entry in which the site stays. failed: whether a replacement was built and over its bound."""
        return replace(self, replacer=None, choice=None, reason=reason, failed=failed)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The site and those inside."""
        return self.site, *self.inside

    @property
    def as_stored(self) -> bool:
        """Whether a weight that another library quantised is used in that format, and not quantised again."""
        return self.replacer is not None and self.site.stored is not None and not self.replacer.takes_stored

    @property
    def observer(self) -> str | None:
        """Which statistics of the site's input calibration collects; see Replacer.observer."""
        if self.replacer is None or self.choice is None or self.as_stored:
            return None
        return self.replacer.observer(self.choice)

    def record(self) -> SiteRecord:
        """This entry as a SiteRecord, with nothing measured."""
        site, choice = self.site, self.choice
        shape = (site.n, site.k) if site.n is not None and site.k is not None else None
        after = (choice.bytes_after, choice.resident_after) if choice else (site.token_bytes, site.bytes)
        tied = tuple(path for path in site.paths if path != site.path)
        return SiteRecord(
            site.path or "(model)", site.role, tied, shape, self.replacer.name if self.replacer else None,
            choice.kernel if choice else None, self.reason, (site.token_bytes, after[0]), (site.bytes, after[1]),
            failed=self.failed, fused=choice.fused if choice else None,
            by_modules=choice.note if choice and choice.fused is False else None,
            stored=None if site.stored is None else site.stored.format_name,
        )  # fmt: skip


def check_owners(entries: list[Entry]) -> None:
    """Raise PlanError where a replaced parent and a child's replacement would own the same weight: the parent takes all
    that is inside it, except children of the roles that it `consumes`."""
    replaced = [(entry, entry.replacer) for entry in entries if entry.replacer is not None]
    owners = {path: (other.site.path, by) for other, by in replaced for path in other.site.own_paths}
    for entry, replacer in replaced:
        parts = [path.split(".") for path in entry.site.paths]
        for parent in (".".join(path[:end]) for path in parts for end in range(len(path) - 1, 0, -1)):
            path, owner = owners.get(parent, ("", None))
            if owner is not None and not owner.consumes & (entry.site.roles | {"*"}):
                raise PlanError(
                    f"two owners of one parameter: {owner.name} takes {path} with all that is in it, and "
                    f"{replacer.name} takes {entry.site.path}; drop one of the two rules"
                )
