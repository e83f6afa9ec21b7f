"""What each site of a plan is built with: its statistics and the smoothing of its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from accelpatch.errors import KernelError, PlanError
from accelpatch.models.family import norm_of
from accelpatch.patching.plan import Plan
from accelpatch.patching.site import Site
from accelpatch.quant.calibration import Statistics
from accelpatch.quant.smoothing import Channels, SiteStatistics, factors, searched, with_divisors
from accelpatch.replacers.weight_kernels import weight_of

SEARCH, CHANNELS = "search", "channels"


def site_statistics(
    plan: Plan, groups: Sequence[Any], statistics: Statistics, progress: Callable[[int, int], None]
) -> dict[str, SiteStatistics]:
    """Path -> what the replacement there is built with. Raises PlanError, naming the site, where something is missing.

    groups: of the plan, those that are smoothed by these: by alpha of the recipe, or by a search over it.
    """
    known = {site.path: site for entry in plan.replaced for site in entry.sites}
    found: dict[str, SiteStatistics] = {}
    needed = {path for group in groups for path in group.consumers}
    auto = set()
    for entry in plan.replaced:
        if entry.observer == CHANNELS:
            needed |= {site.path for site in entry.sites if site.k is not None}
        if entry.choice is not None and entry.choice.detail.get("activations") == "auto":
            auto.add(entry.site.path)
    for path in needed:
        site = known[path]
        if path not in statistics.sites and path in auto:
            continue  # no text reaches it, such as a vision tower: a scale a token then
        try:
            found[path] = SiteStatistics(statistics.of(path, cast(int, site.k)))
        except KernelError as error:
            raise PlanError(str(error)) from None
    alpha = (plan.recipe.calibrate or {}).get("alpha")
    for done, group in enumerate(groups):
        _smooth(cast(Any, group), known, found, alpha)
        progress(done + 1, len(groups))
    for entry in plan.replaced:
        if entry.inside:
            start = len(entry.site.path) + 1
            inside = {site.path[start:]: found.pop(site.path) for site in entry.inside if site.path in found}
            found[entry.site.path] = SiteStatistics(inside=inside)
    return found


def _smooth(group: Any, known: Mapping[str, Site], found: dict[str, SiteStatistics], alpha: Any) -> None:
    """Add a group's factors to its consumers and its source."""
    channels, source = Channels(group.rows, group.size), known[group.source]
    weights = [weight_of(known[path].original) for path in group.consumers]
    inputs = [found[path].inputs for path in group.consumers]
    k = weights[0].shape[1]
    n = source.n if source.n is not None else k
    rows = channels.places(n, k)
    most = torch.stack([one.absmax for one in inputs if one is not None]).amax(0)
    of_weights = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float().cpu()
    figures = channels.of_input(most, len(rows)), channels.of_input(of_weights, len(rows))
    if len(figures[0]) != len(rows):
        raise PlanError(f"{group.source} makes {len(rows)} channels, and {group.consumers[0]} reads {k}: keep both")
    if alpha == SEARCH:
        s = searched(channels, [one for one in inputs if one is not None], weights, figures)
    else:
        s = factors(*figures, alpha)
    s = as_norm_holds(source.original, s.cpu())
    for path in group.consumers:
        found[path] = replace(found[path], factors=channels.to_input(s, k))
    found[group.source] = with_divisors(found.get(group.source, SiteStatistics()), rows, s, n)


def as_norm_holds(source: Any, s: Tensor) -> Tensor:
    """The factors by which a norm's weight in its own dtype divides exactly; those of a linear layer as they are.

    A norm that multiplies by 1 + weight would else lose most digits of 1 / s: in bfloat16 its weight, near -1, has
    steps of 2^-8.
    """
    kind = norm_of(source)
    if kind is None:
        return s
    weight, one = source.weight.detach().cpu(), float(kind.plus_one)
    limits, whole = torch.finfo(weight.dtype), weight.float() + one
    divided = (whole / s - one).clamp(limits.min, limits.max).to(weight.dtype).float() + one
    least = limits.eps if kind.plus_one else limits.tiny  # of what is divided, so that no channel is lost
    divided = torch.where(divided == 0, whole.sign() * least, divided)
    return torch.where(whole == 0, s, whole / divided)
