"""Runs quantised modules of other libraries by the formula of their format, where their forward must not or cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch.errors import FOREIGN, PatchError
from accelpatch.patching.entry import Entry
from accelpatch.patching.plan import Plan
from accelpatch.patching.site import Site
from accelpatch.patching.stored import Stored, WithheldHook, bias_of, unpacking_hooks


def stored_sites(plan: Plan) -> list[Site]:
    """The sites of a plan whose quantised weight is used as it is stored."""
    return [entry.site for entry in plan.replaced if entry.as_stored]


def formula_reasons(sites: Iterable[Site]) -> dict[str, str]:
    """Path of each site whose module has to run by the formula of its format -> why.

    One module of each kind is called with zeros, to see whether its own kernel runs here.
    """
    found: dict[str, str] = {}
    kinds: dict[Any, str] = {}
    for site in sites:
        if site.stored is None or site.stored.refusal is not None:
            continue
        why = site.stored.formula_reason
        if not why:
            kind = (type(site.original), site.stored.format_name, site.n, site.k)
            if kind not in kinds:
                kinds[kind] = _cannot_run(site)
            why = kinds[kind]
        if why:
            found[site.path] = why
    return found


def _cannot_run(site: Site) -> str:
    """Why the module's own forward does not run on its device; "" where it does."""
    tensors = (*site.original.parameters(recurse=False), *site.original.buffers(recurse=False))
    x = torch.zeros(1, site.k or 0, dtype=getattr(torch, site.dtype), device=tensors[0].device)
    try:
        with torch.no_grad():
            site.original.forward(x)
    except FOREIGN as error:
        return f"its own kernel does not run here ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    return ""


@contextmanager
def by_formula(model: nn.Module, sites: Sequence[Site]) -> Iterator[list[str]]:
    """Context manager: modules of these sites whose forward must not or cannot run compute x w^T + bias with the weight
    dequantised by the formula of their format, and no hook of the model unpacks any. Yields notes for the report."""
    found = formula_reasons(sites)
    counts = Counter(
        (site.stored.format_name, found[site.path]) for site in sites if site.stored and site.path in found
    )
    changes = [WithheldHook(model, name, None, None) for name in unpacking_hooks(model, sites)]
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for change in changes:
            change.apply()
        for site in sites:
            if site.path in found and site.stored is not None:
                own = vars(site.original)
                name = "_old_forward" if "_hf_hook" in own else "forward"  # accelerate's forward calls _old_forward
                before.append((own, name, own.get(name)))
                own[name] = partial(_forward, site.original, site.stored)
        yield [f"compared by its formula: {words} ({n} times), for {why}" for (words, why), n in counts.items()]
    finally:
        for own, name, forward in reversed(before):
            if forward is None:
                del own[name]
            else:
                own[name] = forward
        for change in reversed(changes):
            change.revert()


def _forward(module: nn.Module, stored: Stored, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    bias = bias_of(module)
    with torch.no_grad():
        weight = stored.floats(module).to(x.dtype)
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def check_unpacking(entries: Sequence[Entry]) -> None:
    """Raise PatchError if a hook unpacks the whole model at its first call, and only some modules are replaced."""
    packed = [entry for entry in entries if entry.site.stored is not None and entry.site.stored.unpacked_by]
    left = [entry for entry in packed if not entry.as_stored]
    if left and len(left) < len(packed):
        site = left[0].site
        raise PatchError(
            f"{site.path} would stay ({left[0].reason}), and its library unpacks all modules at the model's first "
            "call, those too that are replaced: run the model once and patch it then, or replace all of them"
        )
