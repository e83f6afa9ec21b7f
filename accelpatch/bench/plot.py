"""A bar chart of a benchmark: decode and prefill speed, original and patched, with the read limit.

The bars decide the scale. A limit far above them is an arrow with its number: as a line it would flatten them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

SUFFIXES = (".png", ".svg", ".pdf")
COLORS = {"original": "#9aa5b1", "patched": "#d1495b"}
ROOM = 1.6  # height of the axis, in tallest bars: room for the labels, and for a limit that is near


def check(path: Path) -> None:
    """Raise AccelpatchError for a plot that could not be drawn, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise AccelpatchError("--plot needs matplotlib; install it with: pip install 'accelpatch[plot]'")
    if path.suffix not in SUFFIXES:
        raise AccelpatchError(f"--plot draws {', '.join(SUFFIXES)} files, not {path.name}")


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the record of a benchmark (``accelpatch bench --json``) into an image file; its suffix is the format."""
    from matplotlib.figure import Figure  # the object interface: no window, no global state

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    for axes, stage in zip(figure.subplots(1, 2), ("decode", "prefill"), strict=True):
        draw_stage(axes, record, stage)
    shape = record["shape"]
    figure.suptitle(
        f"{Path(record['model']).name}, recipe {record['recipe']}, {record['dtype']}, {record['device']['name']}\n"
        f"batch {shape['batch']}, {shape['prompt']} prompt tokens, {shape['new']} new tokens, {record['date']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)


def draw_stage(axes: Any, record: Mapping[str, Any], stage: str) -> None:
    """One panel: a bar each for the original and the patched model, in tokens/s, with the spread of the repetitions."""
    names = [name for name in COLORS if name in record]
    rates = [record[name][stage]["tokens_per_second"] for name in names]
    medians = [rate["median"] for rate in rates]
    spread = [[rate["median"] - rate["low"] for rate in rates], [rate["high"] - rate["median"] for rate in rates]]
    bars = axes.bar(names, medians, yerr=spread, capsize=4, width=0.6, color=[COLORS[name] for name in names])
    tallest = max(rate["high"] for rate in rates)
    top = ROOM * tallest
    axes.set_ylim(0, top)
    axes.set_xlim(-0.6, len(names) - 0.3)
    for bar, rate, name in zip(bars, rates, names, strict=True):
        label = number(rate["median"])
        middle, over = bar.get_x() + bar.get_width() / 2, rate["high"]
        if stage == "decode":
            label += f"\n{percent(record[name][stage]['share_of_read_limit'])} of the limit"
            limit = record[name][stage]["limit_tokens_per_second"]
            draw_limit(axes, bar, limit, top)
            over = limit if over < limit < over + 0.2 * top else over  # a label that the line would cross
        axes.annotate(
            label, (middle, over), (0, 5), textcoords="offset points", ha="center", va="bottom", fontsize=10,
        )  # fmt: skip
    axes.set_title(f"{stage}: {number(medians[-1] / medians[0])} x" if len(medians) > 1 else stage)
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)


def draw_limit(axes: Any, bar: Any, limit: float, top: float) -> None:
    """What reading the weights alone would allow: a dashed line where it is on the scale, else an arrow at the top."""
    middle = bar.get_x() + bar.get_width() / 2
    if limit <= 0.97 * top:
        axes.hlines(limit, bar.get_x(), bar.get_x() + bar.get_width(), linestyles="dashed", colors="black")
        axes.annotate(
            f"limit {number(limit)}", (bar.get_x() + bar.get_width(), limit), (3, 0), textcoords="offset points",
            ha="left", va="center", fontsize=8,
        )  # fmt: skip
        return
    axes.annotate("", (middle, top), (middle, 0.93 * top), arrowprops={"arrowstyle": "->", "linestyle": "dashed"})
    axes.annotate(f"read limit {number(limit)}", (middle, 0.92 * top), ha="center", va="top", fontsize=9)


def number(value: float) -> str:
    """Three significant digits, in thousands where it is large: "0.52", "87.3", "1,240", "310k", "1.2M"."""
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e5:
        return f"{value / 1e3:.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    """A share as a percentage, with a digit more where it is small."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
