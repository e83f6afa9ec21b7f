"""A bar chart of a benchmark: decode and prefill speed, original and patched, with the read limit."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raise AccelpatchError for a plot that could not be drawn, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise AccelpatchError("--plot needs matplotlib; install it with: pip install 'accelpatch[plot]'")
    if path.suffix not in SUFFIXES:
        raise AccelpatchError(f"--plot draws {', '.join(SUFFIXES)} files, not {path.name}")
    if not path.absolute().parent.is_dir():
        raise AccelpatchError(f"--plot: there is no folder {path.parent}")


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the record of a benchmark (``accelpatch bench --json``) into an image file; its suffix is the format."""
    from matplotlib.figure import Figure  # the object interface: no window, no global state

    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, stage in zip(figure.subplots(1, 2), ("decode", "prefill"), strict=True):
        names = [name for name in ("original", "patched") if name in record]
        rates = [record[name][stage]["tokens_per_second"] for name in names]
        medians = [rate["median"] for rate in rates]
        spread = [[rate["median"] - rate["low"] for rate in rates], [rate["high"] - rate["median"] for rate in rates]]
        bars = axes.bar(names, medians, yerr=spread, capsize=4, color=["#9aa5b1", "#d1495b"][: len(names)])
        axes.bar_label(bars, fmt="%.1f", padding=4)
        if stage == "decode":
            for bar, name in zip(bars, names, strict=True):
                limit = record[name]["decode"]["limit_tokens_per_second"]
                axes.hlines(limit, bar.get_x(), bar.get_x() + bar.get_width(), linestyles="dashed", colors="black")
        axes.set_title(f"{stage}, tokens/s" + (" (dashed: read limit)" if stage == "decode" else ""))
        axes.margins(y=0.15)
    shape = record["shape"]
    figure.suptitle(
        f"{record['model']}, recipe {record['recipe']}, {record['device']['name']}, batch {shape['batch']}, "
        f"{shape['prompt']} + {shape['new']} tokens, {record['date']}"
    )
    figure.savefig(path, dpi=120)
