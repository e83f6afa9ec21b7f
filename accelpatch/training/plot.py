"""The picture of a run: loss, tokens a second and memory by step. Needs matplotlib, an optional package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TRAINED, EVALUATED = "#9aa5b1", "#d1495b"


def possible() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(log: Sequence[Mapping[str, Any]], result: Mapping[str, Any], title: str, file: Path) -> None:
    """Draw the log of a run into a PNG file. result: as in result.json."""
    from matplotlib.figure import Figure  # the object interface: no window, no global state

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss, rate, memory = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    _loss(loss, log)
    trained = [one for one in log if "loss" in one]
    steps = [one["step"] for one in trained]
    _line(rate, steps, [one["tokens_per_second"] for one in trained], "tokens/s")
    _line(memory, steps, [one["memory"] / 1e9 for one in trained], "peak memory, GB")
    before, after = result.get("exact_before"), result.get("exact_after")
    learnt = "" if before is None or after is None else f"\nheld-out exact match {before:.0%} before, {after:.0%} after"
    figure.suptitle(title + learnt, fontsize=11)
    figure.savefig(file, dpi=120)


def _loss(axes: Any, log: Sequence[Mapping[str, Any]]) -> None:
    for key, name, color, marker in (("loss", "training", TRAINED, ""), ("eval_loss", "held out", EVALUATED, "o")):
        found = [(one["step"], one[key]) for one in log if key in one]
        if found:
            axes.plot(*zip(*found, strict=True), color=color, marker=marker, markersize=4, label=name)
    highest = max((one[key] for one in log for key in ("loss", "eval_loss") if key in one), default=0.0)
    axes.set_ylim(0, 1.15 * highest or 1.0)
    axes.set_title("loss, nats a token")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], title: str) -> None:
    axes.plot(steps, values, color=TRAINED)
    axes.set_ylim(0, 1.15 * max(values, default=1.0) or 1.0)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
