"""Chooses the fastest of several recipes within bounds of fidelity and memory, each measured in its own process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accelpatch.bench.generate import Shape
from accelpatch.errors import AccelpatchError

ORIGINAL = "original"
COMPILED = " with compile: default"  # behind a recipe's name: the same with torch.compile
GAIN = 1.02  # the least by which compiled code must be faster to be taken
FIRST = "exact"  # what others are said to be the same as


@dataclass(frozen=True)
class Bounds:
    """The most that a recipe may depart and take. kl: mean KL(original || patched) in nats. gb: 1e9 bytes of weights,
    KV cache of the stated use and, on a GPU, all else that its process had allocated at the peak; None: no bound."""

    kl: float | None = None
    gb: float | None = None

    def excess(self, kl: float, size: float) -> float:
        """The largest ratio of a figure to its bound; at most 1 is within. kl in nats, size in bytes."""
        ratios = [0.0]
        if self.kl is not None:
            ratios.append(kl / self.kl if self.kl else (float("inf") if kl > 0 else 0.0))
        if self.gb is not None:
            ratios.append(size / (self.gb * 1e9))
        return max(ratios)

    def __str__(self) -> str:
        parts = [f"KL {self.kl:g} nats"] if self.kl is not None else []
        parts += [f"{self.gb:g} GB"] if self.gb is not None else []
        return " and ".join(parts) or "no bounds"


@dataclass(frozen=True)
class Candidate:
    """A recipe that could be tried. size: bytes as planned. read: bytes a token, of which the fewest come first, for
    decoding is bound by them. alike: what its plan replaces by what: another candidate with the same runs as fast.
    same: that and all options. calibrates: whether making it takes a text. compiles: whether torch.compile could take
    what it leaves, as no layer is fused. skipped: why it is not tried."""

    name: str
    size: int = 0
    read: int = 0
    alike: Any = None
    same: Any = None
    calibrates: bool = False
    compiles: bool = False
    skipped: str = ""


@dataclass(frozen=True)
class Trial:
    """A measured recipe. seconds: of one generate() call of the stated use, the median. prefill, decode: its two parts.
    kl, top1: compared with the original. size: bytes, planned or at the peak. failed: why there are no figures."""

    name: str
    seconds: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    kl: float = 0.0
    top1: float = 1.0
    size: float = 0.0
    failed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


#: (recipe or ORIGINAL, seconds that the child process has, seconds of a call above which it is timed once) -> its
#: figures, or why there are none
Run = Callable[[str, float, float], Mapping[str, Any] | str]
HOPELESS = 2.0  # times the fastest call so far
SHARE = 0.25  # of the time of all trials that one of them may take


@dataclass
class Search:
    """What was tried. chosen: the fastest within the bounds, confirmed in one process with the original; None: why
    stands in `refused`. original: its trial."""

    shape: Shape
    bounds: Bounds
    original: Trial = field(default_factory=lambda: Trial(ORIGINAL))
    trials: list[Trial] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    chosen: Trial | None = None
    refused: str = ""

    def within(self) -> list[Trial]:
        """The trials within the bounds, the fastest first."""
        found = [one for one in self.trials if not one.failed and self.bounds.excess(one.kl, one.size) <= 1]
        return sorted(found, key=lambda one: one.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "shape": asdict(self.shape), "bounds": asdict(self.bounds), "original": self.original.to_dict(),
            "trials": [one.to_dict() for one in self.trials], "skipped": dict(self.skipped),
            "chosen": None if self.chosen is None else self.chosen.name, "refused": self.refused,
        }  # fmt: skip


def search(
    candidates: Sequence[Candidate], run: Run, confirm: Run, shape: Shape, bounds: Bounds, limit: float = math.inf,
    budget: float = math.inf,
) -> Search:  # fmt: skip
    """Try the candidates and choose. run: measures one; confirm: measures one and the original in one process, and
    its figures have "original_seconds" too. limit: seconds of a trial. budget: of all trials together, but for the
    original's and those that confirm; one takes SHARE of it at most, and those that calibrate come last. Raises
    AccelpatchError where the original cannot be measured."""
    made = Search(shape, bounds)
    ordered = sorted(candidates, key=lambda one: (one.calibrates, one.read, one.name != FIRST))
    made.original = _trial(ORIGINAL, run(ORIGINAL, limit, math.inf), 0)
    if made.original.failed:
        raise AccelpatchError(f"the original could not be measured: {made.original.failed}")
    end = time.monotonic() + budget
    for one in ordered:
        reason, left = one.skipped or _not_worth(one, made, ordered), end - time.monotonic()
        if reason or left <= 0:
            made.skipped[one.name] = reason or f"the time of all trials, {budget:g} s, was over"
        else:
            best = min(trial.seconds for trial in (made.original, *made.within()))
            most = min(limit, left, budget * SHARE)
            made.trials.append(_trial(one.name, run(one.name, most, HOPELESS * best), one.size))
    _compile(made, ordered, run, limit)
    _choose(made, lambda name: confirm(name, limit, math.inf), {one.name: one.size for one in made.trials})
    return made


def _compile(made: Search, every: Sequence[Candidate], run: Run, limit: float) -> None:
    """Try the fastest within the bounds with torch.compile too; it stays off where it gains nothing."""
    by_name = {one.name: one for one in every}
    plain = made.within()[0] if made.within() else made.original
    one = by_name.get(plain.name, next((one for one in every if one.name == FIRST and one.compiles), None))
    if one is None or not one.compiles:
        return
    name = one.name + COMPILED
    found = _trial(name, run(name, limit, math.inf), one.size)
    if found.failed or plain.seconds >= GAIN * found.seconds:
        made.trials.append(found)
    else:
        made.skipped[name] = f"a call takes {found.seconds:.3g} s, and {plain.seconds:.3g} s without: it is left off"


def _not_worth(one: Candidate, made: Search, every: Sequence[Candidate]) -> str:
    """Why a candidate is not measured, given those that were: "" where it is."""
    if made.bounds.excess(0.0, one.size) > 1:
        return f"it takes {one.size / 1e9:.2f} GB, more than {made.bounds.gb:g} GB"
    tried = {trial.name: trial for trial in made.trials if not trial.failed}
    for other in every:
        if other.name not in tried or other is one:
            continue
        if other.same == one.same:
            return f"it is the same here as {other.name}"
        if one.calibrates and other.alike == one.alike:
            if made.bounds.excess(tried[other.name].kl, tried[other.name].size) <= 1:
                return f"it runs as fast as {other.name}, which is within the bounds"
            best = made.within()
            if best and best[0].seconds < tried[other.name].seconds:
                return f"it runs as fast as {other.name}, and {best[0].name} is faster"
    return ""


def _trial(name: str, found: Mapping[str, Any] | str, size: float) -> Trial:
    if isinstance(found, str):
        return Trial(name, size=size, failed=found)
    prefill, decode = float(found["prefill"]), float(found["decode"])
    far = float(found.get("kl", 0.0)), float(found.get("top1", 1.0))
    return Trial(name, prefill + decode, prefill, decode, *far, size=max(float(size), float(found.get("peak", 0.0))))


def _choose(made: Search, confirm: Callable[[str], Mapping[str, Any] | str], sizes: Mapping[str, float]) -> None:
    """Take the fastest within the bounds that is faster than the original in one process with it."""
    within = made.within()
    if not within:
        made.refused = nearest(made)
        return
    for one in within:
        if one.seconds >= made.original.seconds:
            break
        found = confirm(one.name)
        again = _trial(one.name, found, sizes[one.name])
        if isinstance(found, str) or again.seconds >= float(found["original_seconds"]):
            why = again.failed or "it was slower than the original when both ran in one process"
            made.skipped[one.name] = f"not confirmed: {why}"
            continue
        made.chosen = one
        return
    made.refused = (
        f"no recipe within {made.bounds} is faster than the original, which takes {made.original.seconds:.3f} s a "
        "call: leave the model as it is, or allow more"
    )


def nearest(made: Search) -> str:
    """What to say where nothing is within the bounds: which recipe is the nearest, and by how much it is over them."""
    measured = [one for one in made.trials if not one.failed]
    if not measured:
        reasons = {**made.skipped, **{one.name: one.failed for one in made.trials}}
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return f"no recipe could be tried within {made.bounds}: {why}"
    best = min(measured, key=lambda one: made.bounds.excess(one.kl, one.size))
    return (
        f"no recipe is within {made.bounds}: the nearest is {best.name} with KL {best.kl:.3g} nats and "
        f"{best.size / 1e9:.2f} GB; allow so much, or give other recipes (--recipes)"
    )


def comments(made: Search, model: str, device: str) -> list[str]:
    """What the recipe file says of where its figures are from: lines without their marks."""
    shape, best = made.shape, made.chosen
    assert best is not None
    lines = [
        f"the fastest of {len([one for one in made.trials if not one.failed])} recipes within {made.bounds}",
        f"model {model} on {device}; batch {shape.batch}, prompt {shape.prompt}, {shape.new} new tokens",
        f"a generate() call takes {best.seconds:.4g} s, that of the original {made.original.seconds:.4g} s "
        f"({made.original.seconds / best.seconds:.2f} x); KL {best.kl:.3g} nats, top-1 agreement {best.top1:.1%}, "
        f"{best.size / 1e9:.3g} GB",
    ]
    return lines + [f"{one.name}: {_line(one)}" for one in made.trials]


def _line(one: Trial) -> str:
    return one.failed or f"{one.seconds:.4g} s, KL {one.kl:.3g} nats, {one.size / 1e9:.3g} GB"
