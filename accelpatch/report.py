"""The report of a patch: what was done at each site and why, the verification's figures; and its printed form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ORIGINAL = "the original"
# Paths of drafts that a model makes: tokens drafted, those that were accepted, steps that checked some, and the
# reason after NO_DRAFTS.
DRAFTED = "draft tokens of a model"
DRAFTS_ACCEPTED = "draft tokens of a model, accepted"
DRAFT_CHECKS = "steps that checked drafts of a model"
NO_DRAFTS = "no drafts of a model by captured steps: "


@dataclass
class SiteRecord:
    """The decision about one site, and after a patch its measured errors.

    shape: (N, K) of the weight. reason: why the site is not replaced. token_bytes, resident_bytes: (before, after)
    bytes of the weight that are read to decode one token, and that it takes in memory. kernel_error: the largest error
    against the float64 reference; kernel_bound: what the float rule (kernels/check/parity.py) allows there.
    format_error: the difference from the original, in the recipe's metric. Errors are None where nothing was measured;
    `unverified` says why. failed: the replacement was over its bound, so the original stays. fused: for a layer,
    whether decode steps run it fused; None for all other sites. by_modules: why a replaced layer's modules run in place
    of the fused one. steps: whether the errors are those of the fused layer, in a prompt and cached steps. stored: the
    format of a weight that another library quantised.
    """

    path: str
    role: str
    tied: tuple[str, ...]
    shape: tuple[int, int] | None
    replacer: str | None
    kernel: str | None
    reason: str | None
    token_bytes: tuple[int, int]
    resident_bytes: tuple[int, int]
    kernel_error: float | None = None
    kernel_bound: float | None = None
    format_error: float | None = None
    unverified: str | None = None
    failed: bool = False
    fused: bool | None = None
    by_modules: str | None = None
    steps: bool = False
    stored: str | None = None

    @property
    def kernel_share(self) -> float | None:
        """kernel_error / kernel_bound: at most 1 for a replacement that passed; None where nothing was measured."""
        if self.kernel_error is None or self.kernel_bound is None:
            return None
        return self.kernel_error / self.kernel_bound if self.kernel_bound else float(self.kernel_error > 0)


@dataclass
class Verification:
    """The patched model against the original: the whole model's figures, and the worst ones of its sites.

    kl: mean KL(original || patched) of the next-token distributions, in nats. top1: share of equal most likely tokens.
    tokens: how many were compared. worst_kernel_error: largest `SiteRecord.kernel_share`. worst_format_error: largest
    format_error. failures: messages about the sites whose replacement was over its bound, so that the original stays.
    fused_layers: how many fused layers were verified in a prompt and cached steps. worst_fused_error: the largest
    `SiteRecord.kernel_share` among them. against: what the whole model was compared with. extent: how much was verified
    (patching/extent.py). before: whether all was, by the same kernels, before the model was saved.
    """

    kl: float | None = None
    top1: float | None = None
    tokens: int = 0
    worst_kernel_error: float | None = None
    worst_format_error: float | None = None
    failures: list[str] = field(default_factory=list)
    fused_layers: int = 0
    worst_fused_error: float | None = None
    against: str = ORIGINAL
    extent: str = "auto"
    before: bool = False


@dataclass
class Report:
    """What a patch did. `str(report)` is for people, `to_dict()` for programs.

    seconds: time of each stage of the patch. paths: execution path of the patched model, with the reason where it is
    not the fastest -> number of calls. quality: what is to be said of the difference from the original where the
    verification could not measure it; None where it did.
    """

    model: str
    recipe: str
    device: str
    sites: list[SiteRecord]
    verification: Verification | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    paths: Mapping[str, int] = field(default_factory=dict)
    quality: str | None = None

    @property
    def replaced(self) -> int:
        """Number of replaced sites."""
        return sum(site.replacer is not None for site in self.sites)

    @property
    def token_bytes(self) -> tuple[int, int]:
        """(before, after): bytes of weights read to decode one token."""
        return _total(site.token_bytes for site in self.sites)

    @property
    def resident_bytes(self) -> tuple[int, int]:
        """(before, after): bytes that the weights take in memory."""
        return _total(site.resident_bytes for site in self.sites)

    def why_nothing(self) -> str | None:
        """Why no site is replaced, with the commonest reason; None where one is."""
        if self.replaced:
            return None
        reasons = Counter(site.reason for site in self.sites if site.reason)
        most = f": {reasons.most_common(1)[0][0]}" if reasons else ""
        return f"recipe {self.recipe} replaces none of the {len(self.sites)} modules of {self.model}{most}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "device": self.device,
            "replaced": self.replaced,
            "kept": len(self.sites) - self.replaced,
            "token_bytes": dict(zip(("before", "after"), self.token_bytes, strict=True)),
            "resident_bytes": dict(zip(("before", "after"), self.resident_bytes, strict=True)),
            "sites": [asdict(site) for site in self.sites],
            "verification": asdict(self.verification) if self.verification else None,
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
            "paths": dict(self.paths),
        }

    def lines(self, arch: str = "") -> list[str]:
        """What is replaced by what, and the bytes. arch: behind the device's name."""
        title = f"{self.model} with recipe {self.recipe} on {self.device}{arch}"
        table = ["", site_table(self.sites), ""]
        token, resident = self.token_bytes, self.resident_bytes
        read = f"bytes a token: {human(token[0])} -> {human(token[1])} ({ratio(token)})"
        weights = f"weights held: {human(resident[0])} -> {human(resident[1])} ({ratio(resident)})"
        return [title, *fused_lines(self.sites), *table, f"{read}; {weights}"]

    def __str__(self) -> str:
        lines = self.lines()
        if self.verification:
            lines.append(verification_line(self.verification))
        if self.quality:
            lines.append(f"quality: {self.quality.replace(chr(10), '; ')}")
        lines += [f"{count} calls: {path}" for path, count in self.paths.items()]
        return "\n".join(lines + self.notes)


def _total(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    listed = list(pairs)
    return sum(before for before, _ in listed), sum(after for _, after in listed)


def fused_lines(sites: Sequence[SiteRecord]) -> list[str]:
    """One line: how many layers decode steps run fused, their share of a step's bytes, and why the others are not."""
    layers = [site for site in sites if site.role == "layer"]
    if all(layer.fused is None for layer in layers):
        return []
    fused = tuple(f"{layer.path}." for layer in layers if layer.fused)
    inside = [site for site in sites if fused and (site.role == "head" or site.path.startswith(fused))]
    read, total = (_total(site.token_bytes for site in among)[1] for among in (inside, sites))
    line = f"{len(fused)} of {len(layers)} layers fused, {read / total if total else 0:.1%} of a step's bytes"
    rest = [(layer.path, layer.by_modules or layer.reason) for layer in layers if not layer.fused]
    reasons = [f"; {path}: {why}" if why else f"; {path}" for path, why in rest]
    return [line + "".join(reasons[:1]) + ("; ..." if reasons[1:] else "")]


def verification_line(v: Verification) -> str:
    """One line: the worst errors of the sites, and the whole model's figures."""
    parts = []
    if v.worst_kernel_error is not None:
        parts.append(f"worst kernel error {v.worst_kernel_error:.0%} of the float rule's bound")
    if v.worst_format_error is not None:
        parts.append(f"worst format error {v.worst_format_error:.4f}")
    if v.kl is not None and v.top1 is not None:
        if v.against == ORIGINAL:
            parts.append(
                f"KL {v.kl:.2e} nats, top-1 agreement {v.top1:.1%} over {v.tokens} tokens, against the original"
            )
        else:  # says nothing of what rounding costs, and must not be read so
            parts.append(f"generate() beside {v.against}: KL {v.kl:.2e} nats over {v.tokens} tokens")
    if v.worst_fused_error is not None:
        worst = f"worst {v.worst_fused_error:.0%} of the bound"
        parts.append(f"{v.fused_layers} fused layers beside their modules, {worst}")
    if v.before:
        parts.append("the first of each kind; the rest before it was saved, by the same kernels on the same arch")
    elif v.extent == "quick":
        parts.append("the first of each kind alone")
    every = "every site" if v.extent != "quick" else "each of them"
    parts.append(f"{len(v.failures)} sites over their bound" if v.failures else f"{every} within its bound")
    return "verified: " + "; ".join(parts)


def site_table(sites: Sequence[SiteRecord]) -> str:
    """The sites as a table; sites that differ only in their layer's number share a line."""
    groups: dict[tuple[object, ...], list[SiteRecord]] = {}
    for site in sites:
        shape = re.sub(r"\d+", "*", site.path)
        why = re.sub(r"\d+", "*", site.reason or site.by_modules or "")
        key = (shape, site.role, site.shape, site.replacer, site.kernel, why, site.stored)
        groups.setdefault(key, []).append(site)
    rows: list[Sequence[str]] = [
        ("site", "count", "weight [N, K]", "replacement", "kernel", "bytes", "after", "why it stays")
    ]
    for members in groups.values():
        first = members[0]
        before, after = _total(site.resident_bytes for site in members)
        name = span([site.path for site in members]) + (f" (+ {', '.join(first.tied)})" if first.tied else "")
        size = f"{first.shape[0]} x {first.shape[1]}" if first.shape else ""
        cells = [human(before) if before else "", human(after) if before and first.replacer else ""]
        why = first.reason or first.by_modules or ""
        made = first.replacer or "stays"
        made = f"{made} ({first.stored}: as stored)" if first.replacer and first.stored else made
        row = (name, str(len(members)), size, made, first.kernel or "", *cells, why)
        rows.append(row)
    return table(rows)


def span(paths: list[str]) -> str:
    """Paths of one form as a single one, their varying numbers as ranges: `model.layers.{0..29}.mlp`."""
    if len(paths) == 1:
        return paths[0]
    pieces = [re.split(r"(\d+)", path) for path in paths]
    varying = [i for i, column in enumerate(zip(*pieces, strict=True)) if len(set(column)) > 1]
    first = pieces[0]
    for i in varying:
        first[i] = "{" + _ranges(sorted({int(piece[i]) for piece in pieces})) + "}"
    return "".join(first)


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as ranges: "0..2,5" for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text, the first row as the heading; columns of bytes and counts are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [rows[0][i] in ("count", "bytes", "after") for i in range(len(widths))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def human(size: int) -> str:
    """A number of bytes in decimal units, such as "134.5 MB"."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def ratio(pair: tuple[int, int]) -> str:
    """after / before of a (before, after) pair, as a percentage."""
    before, after = pair
    return f"{after / before:.1%}" if before else "nothing to read"
