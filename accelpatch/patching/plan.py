"""Makes a Plan from model, recipe and device. Pure; errors in a recipe show here, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from accelpatch import own_code
from accelpatch.device import Device
from accelpatch.errors import PlanError
from accelpatch.own_code.wrapped_forward import has_own_forward
from accelpatch.patching import groups as smoothing
from accelpatch.patching.cache_size import cache_size
from accelpatch.patching.decoding_note import decoding_note
from accelpatch.patching.entry import Entry, check_owners
from accelpatch.patching.groups import Group
from accelpatch.patching.match import ATTENTION, matches, rule_for, sites
from accelpatch.patching.placement import WHOLE, Placement
from accelpatch.patching.replacer import Choice, Reason, Replaced, Replacer
from accelpatch.patching.site import Site
from accelpatch.patching.stored import StoredOf, float_site, none_stored
from accelpatch.patching.towers import part_notes
from accelpatch.recipe.recipe import Recipe, Rule
from accelpatch.report import Report, human


@dataclass(frozen=True, eq=False)
class Plan:
    """Which site is replaced by what, and why the others stay. Making one allocates nothing and changes nothing.

    max_length, cache_bytes: length in tokens and bytes of the KV cache at batch 1, in the recipe's format, that `fits`
    counts in addition to the weights. groups: what is smoothed together. notes: about groups that are not smoothed, and
    other remarks that the report prints. model_notes: about the model's parts: their devices, how an encoder-decoder
    generates, a multimodal model's towers. explain_kernels: makes the table of `why` from the specs of the choices.
    """

    model: str
    recipe: Recipe
    device: Device
    entries: tuple[Entry, ...]
    max_length: int | None = None
    cache_bytes: int = 0
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    model_notes: tuple[str, ...] = ()
    explain_kernels: Callable[[Sequence[Any], Device], str] = lambda specs, device: ""

    @property
    def calibrates(self) -> bool:
        """Whether the patch needs statistics of the model's activations."""
        return bool(self.groups) or any(entry.observer is not None for entry in self.entries)

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """The entries with a replacement, parents before their children."""
        return tuple(entry for entry in self.entries if entry.replacer is not None)

    def without(self, failed: Mapping[str, str]) -> Plan:
        """This plan with the failed sites kept. failed: path -> why its replacement was over its bound."""
        entries = (e.kept(failed[e.site.path], failed=True) if e.site.path in failed else e for e in self.entries)
        kept = {site.path for e in self.entries if e.site.path in failed for site in e.sites}
        groups = tuple(group for group in self.groups if group.source not in kept)
        return replace(self, entries=tuple(entries), groups=groups)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The device libraries that the replacements launch, as far as that is known before they are built."""
        needed = dict.fromkeys(name for e in self.replaced if e.choice is not None for name in e.choice.libraries)
        return tuple(sorted(needed))

    def report(self) -> Report:
        """The plan as a Report with nothing measured."""
        records = [entry.record() for entry in self.entries]
        choices = [entry.choice for entry in self.entries if entry.choice is not None]
        of_choices = dict.fromkeys(one.note for one in choices if one.note and one.fused is not False)
        notes = [*self.model_notes, *smoothing.lines(self.groups), *self.notes, *of_choices, *self._without_effect()]
        return Report(self.model, self.recipe.name, self.device.name, records, notes=notes)

    def _without_effect(self) -> list[str]:
        """Notes about settings of the recipe that have no effect here."""
        runtime = self.recipe.runtime
        ineffective = {}
        if self.device.kind == "cpu":  # CPU steps are not captured
            ineffective = {"runtime.cache": runtime.cache != "auto", "runtime.graph": runtime.graph != "auto"}
            ineffective["runtime.speculate"] = runtime.speculate != "off"
            ineffective["runtime.tunableop"] = runtime.tunableop is not None
        ineffective["runtime.inductor"] = bool(runtime.inductor) and runtime.compile == "off"
        ineffective["runtime.kv_cache"] = runtime.kv_cache != "auto" and not self.cache_bytes
        ineffective["calibrate"] = self.recipe.calibrate is not None and not self.calibrates
        return [f"{key} is set and has no effect here" for key, is_set in ineffective.items() if is_set]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights after the patch."""
        return self.report().resident_bytes[1]

    @property
    def fits(self) -> bool:
        """Whether the patched weights and the KV cache fit the device's memory."""
        return self.resident_bytes + self.cache_bytes <= self.device.memory

    @property
    def longest(self) -> int | None:
        """The longest context in tokens, at batch 1, whose KV cache fits in memory with the weights; None without a
        cache."""
        if not self.cache_bytes or not self.max_length:
            return None
        return max(0, (self.device.memory - self.resident_bytes) // (self.cache_bytes // self.max_length))

    def detached(self) -> Plan:
        """A copy that holds no reference to the model's modules."""
        entries = tuple(
            replace(entry, site=entry.site.detached(), inside=tuple(site.detached() for site in entry.inside))
            for entry in self.entries
        )
        return replace(self, entries=entries)

    def why(self) -> str:
        """A table for people, one part an operation: which implementation runs for how many rows of x (attention:
        queries) on the plan's device, on what it was measured, and why the implementations preferred to it cannot."""
        specs = [entry.choice.spec for entry in self.replaced if entry.choice is not None]
        return self.explain_kernels([spec for spec in specs if spec is not None], self.device)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        facts = self.report().to_dict()
        for key in ("verification", "seconds", "paths"):
            del facts[key]
        memory = {"device_bytes": self.device.memory, "cache_bytes": self.cache_bytes, "max_length": self.max_length,
                  "longest": self.longest}  # fmt: skip
        return facts | {"arch": self.device.arch, "memory": memory | {"fits": self.fits}}

    def __str__(self) -> str:
        report = self.report()
        verdict = "fits" if self.fits else "does NOT fit"
        form = self.recipe.runtime.kv_cache
        kind = "" if form == "auto" else f" in {form}"
        cache = f" + cache {human(self.cache_bytes)} at {self.max_length} tokens{kind}" if self.cache_bytes else ""
        memory = f"memory: weights {human(self.resident_bytes)}{cache} {verdict} {human(self.device.memory)}"
        memory += f"; at batch 1 a context of {self.longest} tokens fits" if self.longest else ""
        return "\n".join([*report.lines(f" ({self.device.arch})"), memory, *report.notes])


def make_plan(
    model: nn.Module, recipe: Recipe, device: Device, roles: Mapping[str, str], registry: Mapping[str, Replacer],
    groups: Sequence[Group] = (), stored_of: StoredOf = none_stored, placement: Placement = WHOLE, slower: bool = False,
) -> Plan:  # fmt: skip
    """Decide about every site of `model`.

    roles: the family's table (glob -> role). registry: replacer names -> replacers. groups: the family's smoothing
    groups, used if the recipe has an alpha. stored_of: see `sites`; where a rule matches a module whose weight another
    library quantised, the replacer of that format is used in place of the rule's. placement: where the model's parts
    are. slower: also take replacements that are slower than the originals; for weights of a checkpoint, which have no
    originals.

    Raises PlanError for an unknown replacer, a rule that matches nothing, a weight with two owners, a tie that would be
    split, and a group that would be smoothed in part.
    """
    for rule in recipe.rules:
        _check_rule(rule, registry)
    found = sites(model, roles, stored_of, placement.ties)
    found = [site for site in found if site.role != ATTENTION or site.bytes or rule_for(site, recipe) is not None]
    _check_all_match(recipe, found)
    entries = _absorbed([_decide(site, recipe, device, registry, slower) for site in found])
    check_owners(entries)
    entries = _completed(entries, device)
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    length, cache = cache_size(model, recipe.runtime.max_length, recipe.runtime.kv_cache)
    smooths = {site.path: entry.replacer.smooths for entry in entries if entry.replacer for site in entry.sites}
    wanted = groups if (recipe.calibrate or {}).get("alpha") is not None else ()
    modules = [(site.path, site.module) for entry in entries for site in entry.sites if site.module is not None]
    hooked = [path for path, one in modules if one._forward_hooks or one._forward_pre_hooks]
    smoothed, left = smoothing.chosen(wanted, smooths, hooked, smoothing.not_multiplied(found))
    model_notes = (*placement.lines(), *decoding_note(model, recipe, device), *part_notes(model, found))
    return Plan(name, recipe, device, tuple(entries), length, cache, smoothed, tuple(left), model_notes)


def _check_rule(rule: Rule, registry: Mapping[str, Replacer]) -> None:
    if rule.replace == "keep":
        return
    if rule.replace not in registry:
        known = ", ".join(sorted(registry))
        raise PlanError(f"{rule.place}: no replacer is called {rule.replace}; registered are: {known}")
    try:
        registry[rule.replace].check_options(rule.options)
    except PlanError as error:
        raise PlanError(f"{rule.place}: {error}") from None


def _check_all_match(recipe: Recipe, found: list[Site]) -> None:
    for rule in recipe.rules:
        if not rule.optional and not any(matches(site, rule.match) for site in found):
            raise PlanError(
                f"{rule.place}: the rule for {rule.replace} matches no module of this model; "
                "correct its match, or mark it `optional: true`"
            )


def _decide(site: Site, recipe: Recipe, device: Device, registry: Mapping[str, Replacer], slower: bool) -> Entry:
    if not site.path:
        return Entry(site, None, reason="parameters of the model itself, in none of its modules")
    rule = rule_for(site, recipe)
    if rule is None:
        if site.role == "experts":
            shapes = [str(list(p.shape)) for p in site.original._parameters.values() if p is not None and p.dim() == 3]
            return Entry(site, None, reason=f"{' and '.join(shapes)} expert weights: no replacer takes them yet")
        return Entry(site, None, reason="no rule of the recipe matches")
    if rule.replace == "keep":
        return Entry(site, rule, reason="kept by the recipe")
    replacer = registry[rule.replace]
    if site.adapted:
        return Entry(site, rule, reason=f"an adapter changes {' and '.join(site.adapted)} each time it runs")
    if site.stored is None or replacer.takes_stored:
        answer = _propose(site, rule, replacer, device)
        if isinstance(answer, Choice) and answer.slower and not slower:
            answer = Reason(answer.slower)
    else:
        replacer = registry.get(site.stored.replacer, replacer)
        answer = _propose_stored(site, replacer, device)
    if isinstance(answer, Choice):
        return Entry(site, rule, replacer, answer)
    if rule.otherwise == "error":
        raise PlanError(f"{rule.place}: {site.path} cannot become {rule.replace}: {answer.text}")
    return Entry(site, rule, reason=answer.text)


def _absorbed(entries: list[Entry]) -> list[Entry]:
    """The entries without those inside a module whose replacer is `whole`; their bytes are added to that module's."""
    whole = {entry.site.path: entry for entry in entries if entry.replacer is not None and entry.replacer.whole}
    parts: dict[str, list[Site]] = {path: [] for path in whole}
    outside = []
    for entry in entries:
        parent = next((path for path in whole if entry.site.path.startswith(f"{path}.")), None)
        if parent is None:
            outside.append(entry)
        else:
            parts[parent].append(entry.site)
    return [_including(entry, parts[entry.site.path]) if entry.site.path in whole else entry for entry in outside]


def _including(entry: Entry, inside: Sequence[Site]) -> Entry:
    every = (entry.site, *inside)
    size, token = sum(site.bytes for site in every), sum(site.token_bytes for site in every)
    return replace(entry, site=replace(entry.site, bytes=size, token_bytes=token), inside=tuple(inside))


def _completed(entries: list[Entry], device: Device) -> list[Entry]:
    """The entries after `Replacer.complete`, for choices that depend on those of other sites."""
    replaced: dict[str, Replaced | None] = {}
    for entry in entries:
        by = None
        if entry.replacer and entry.choice:
            by = Replaced(entry.replacer.name, entry.choice.kernel, entry.replacer.fusable)
        replaced |= dict.fromkeys(entry.site.paths, by)
    return [
        entry
        if entry.replacer is None or entry.choice is None
        else replace(entry, choice=entry.replacer.complete(entry.site, entry.choice, replaced, device))
        for entry in entries
    ]


def _propose(site: Site, rule: Rule, replacer: Replacer, device: Device) -> Choice | Reason:
    for member in (site, *site.tied):
        if has_own_forward(member.original):
            return Reason(f"{member.path} has a forward of its own on the instance")
        inside = member.original.modules() if replacer.whole else (member.original,)
        if replacer.stands_for_code and (reason := own_code.why_not_in(inside)):
            return Reason(reason)
    if site.tied and not replacer.ties:
        names = ", ".join(path for path in site.paths if path != site.path)
        raise PlanError(
            f"{rule.place}: {rule.replace} would split the weight that {site.path} shares with {names}; "
            "use a replacer that takes them together, or keep them"
        )
    return replacer.propose(site, rule.options, device)


def _propose_stored(site: Site, replacer: Replacer, device: Device) -> Choice | Reason:
    """What the replacer of a quantised weight's own format would do, or why the module stays."""
    stored, module = site.stored, site.original
    assert stored is not None
    if stored.refusal is not None:
        return Reason(f"{stored.format_name}: {stored.refusal}")
    if has_own_forward(module) and not stored.own_forward:
        return Reason(f"{site.path} has a forward of its own on the instance")
    if site.tied:
        return Reason(f"{stored.format_name}: it shares its weight with {site.tied[0].path}")
    answer = replacer.propose(float_site(site), stored.options, device)
    if isinstance(answer, Choice) and (reason := stored.why_not(answer)):
        return Reason(f"{stored.format_name}: {reason}")
    return replace(answer, bytes_before=site.token_bytes) if isinstance(answer, Choice) else answer
