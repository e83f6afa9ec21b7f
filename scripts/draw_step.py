"""Draws docs/step.png, the picture of a decode step, not to scale: python scripts/draw_step.py [FILE]."""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[1]
PREFETCH, WORK, SAMPLER, HOST = "#c9d6df", "#2a6f97", "#d1495b", "#6b705c"
LAYER = (
    ("norm, q k v", 3.0),
    ("rotary, cache\nwrite, attention", 2.4),
    ("o + residual", 2.0),
    ("norm, gate up, silu", 4.0),
    ("down + residual", 2.6),
)
AHEAD_FOR = 1.5  # how long a kernel has been there when the one before it ends


def box(axes: Axes, begin: float, end: float, row: float, text: str, colour: str, ink: str = "white") -> None:
    axes.add_patch(
        FancyBboxPatch((begin, row), end - begin, 0.72, boxstyle="round,pad=0,rounding_size=0.1", fc=colour, ec="white")
    )
    axes.text((begin + end) / 2, row + 0.36, text, ha="center", va="center", color=ink, fontsize=7.5)


def layer(axes: Axes, begin: float) -> float:
    """Five kernels, each on the row that the one before it left free; where the last one ends."""
    for at, (text, length) in enumerate(LAYER):
        row = 2.4 if at % 2 == 0 else 1.5
        what = "cache" if at == 1 else "weights"
        box(axes, begin - AHEAD_FOR, begin, row, f"prefetches\nits {what}", PREFETCH, "black")
        box(axes, begin, begin + length, row, text, WORK)
        begin += length
    return begin


def draw() -> Figure:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots()
    begin = 4.2
    end = layer(axes, begin)
    axes.annotate("", (end, 3.45), (begin, 3.45), arrowprops={"arrowstyle": "<->", "color": "black"})
    axes.text((begin + end) / 2, 3.55, "a layer: five kernels, again and again", ha="center", fontsize=9)
    box(axes, end - AHEAD_FOR, end, 1.5, "prefetches\nits weights", PREFETCH, "black")
    box(axes, end, end + 2.2, 1.5, "norm, head", WORK)
    last = end + 2.2
    box(axes, last, last + 2.6, 2.4, "sampler; end\nof sequence?", SAMPLER)
    box(axes, begin, begin + 4.0, 0.3, "queues the next step,\nreads the last token", HOST)
    box(axes, last + 2.6, last + 5.0, 0.3, "reads this\ntoken", HOST)
    axes.annotate(
        "", (last + 3.0, 1.05), (last + 2.3, 2.4), arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=0.2"}
    )
    axes.text(0.0, 2.3, "GPU: a graph for\nthe model, and one\nfor the sampler", fontsize=8, va="center")
    axes.text(0.0, 0.66, "host", fontsize=8, va="center")
    axes.set_xlim(-0.2, last + 5.2)
    axes.set_ylim(0.1, 4.0)
    axes.axis("off")
    return figure


def main() -> None:
    """Draw it into the file that was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "docs/step.png", metavar="FILE",
                        help="The picture to write (default: docs/step.png of this checkout).")  # fmt: skip
    draw().savefig(parser.parse_args().file, dpi=130)


if __name__ == "__main__":
    main()
