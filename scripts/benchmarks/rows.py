"""The four linear layers of a 7B model's layer by their rows: every format beside torch's own product.

    python scripts/bench.py rows [--cases int4 int8 smoothquant fp8] [--rows 1 8 16 32 64 128 256 512 1024]
        [--device cuda] [--dtype bfloat16] [--implementations] [--peers humming] [--plot rows.png]

The ratio is torch's time over the format's: above 1 the format is faster. Each product is what a patched model of the
recipe calls, by the implementation that the table of kernels/choice.py takes, and is held to the float rule before it
is timed. On a GPU the weights are in rotation beyond the L2 cache, and one graph has them all; the last column is the
mean of the four shapes. --implementations has a line for each implementation that can run. --peers humming has the
products of Humming (`pip install humming-kernels`), whose kernels nvcc compiles at their first use.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.bench.timing import measure_replays
from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.layout import Layout
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear.by_layout import LINEARS
from accelpatch.quant import fp8, int4, int8
from scripts.benchmarks.harness import TINY, Option, Table, cases, common, device_of
from scripts.benchmarks.kernels import LAYER, rotation, timed

#: format -> bits of a weight, and the canonical weight of a float one on a device
FORMATS: dict[str, tuple[float, Callable[[Tensor], Any]]] = {
    "int4": (4.25, lambda w: int4.quantize(w, group_size=128)),
    "int4-symmetric": (4.125, lambda w: int4.quantize(w, group_size=128, symmetric=True)),
    "int8": (8, lambda w: int8.quantize(w, group_size=None if w.is_cuda else 128)),
    "int8-groups": (8.25, lambda w: int8.quantize(w, group_size=128)),
    "smoothquant": (8, lambda w: W8A8Rows(*int8.quantize(w).arguments(), None)),
    "fp8": (8, lambda w: W8A8Rows(*fp8.quantize(w).arguments())),
}
CASES = ["int4", "int8", "smoothquant", "fp8"]
#: format -> Humming's own of the same bits, with symmetric codes
HUMMING = {"int4": {"dtype": "int4", "group_size": 128}, "int8": {"dtype": "int8"}}
OPTIONS = (
    *common(device="cuda", dtype="bfloat16"), cases(CASES, "The formats to time.", FORMATS),
    Option("rows", [1, 8, 16, 32, 64, 128, 256, 512, 1024], "The numbers of rows of x."),
    Option("implementations", False, "A line for each implementation that can run, not for the chosen one alone."),
    Option("peers", [], "Other engines beside int4 and int8, on a GPU.", choices=["humming"]),
    Option("plot", None, "Draw the mean ratio over the rows here.", kind=Path, metavar="FILE"), TINY,
)  # fmt: skip
SMALL = (("wide", 256, 128), ("long", 128, 256))  # --tiny


def laid_out(name: str, w: Tensor, dtype: torch.dtype) -> Layout:
    """A float weight in the layout that a patched model has on its device."""
    rows = FORMATS[name][1](w)
    row = LINEARS[type(rows)]
    if w.is_cuda:
        return row.tiles(rows, dtype) or rows
    held: Layout = rows if row.packed is None else row.packed(rows)
    return held


def product(x: Tensor, weight: Layout) -> Tensor:
    """y as a module computes it."""
    y: Tensor = LINEARS[type(weight)].operation(x, *weight.arguments(), None)
    return y


def implementations(x: Tensor, weight: Layout, every: bool) -> list[str]:
    """The one that is chosen, or all that can run, that one first."""
    op = LINEARS[type(weight)].op
    call, here = dispatch.kernel(op).spec(x, *weight.arguments(), None), probe(x.device)
    able = [name for name in dispatch.order(op, call, here) if dispatch.why_not(op, name, call, here) is None]
    able += [name for name in dispatch.kernel(op).implementations if name not in able and every
             and dispatch.why_not(op, name, call, here) is None]  # fmt: skip
    return [name for name in able if name != "torch"] or able if every else able[:1]


def check(name: str, x: Tensor, weight: Layout, by: str) -> None:
    """Ends the program where a product is over the float rule."""
    row = LINEARS[type(weight)]
    found = parity.check(row.op, (x, *weight.arguments(), None), (product(x, weight),))[0]
    if not found.ok:
        raise SystemExit(f"{name} by {by}, {x.shape[0]} rows: {found.reason}; nothing is timed")


def humming(name: str, w: Tensor) -> Any:
    """A float weight as a layer of Humming's, which is called with x."""
    from humming.layer import HummingLayer

    n, k = w.shape
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=HUMMING[name], torch_dtype=w.dtype).to(w.device)
    layer.load_from_unquantized(w)
    layer.transform()
    x = torch.randn(8, k, device=w.device, dtype=w.dtype)
    due = torch.mm(x, w.t())
    if (error := float((layer(x) - due).norm() / due.norm())) > (0.15 if name == "int4" else 0.02):
        raise SystemExit(f"humming's {name} is {error:.1%} from the float product; nothing is timed")
    return layer


def times(asked: argparse.Namespace, n: int, k: int) -> Iterator[tuple[int, str, str, float, float]]:
    """(rows, format, implementation, seconds, torch's seconds) of one shape."""
    device, dtype = device_of(asked), getattr(torch, asked.dtype)

    def made(bits: float, of: Callable[[Tensor], Any]) -> list[Any]:
        count = rotation(n, k, bits) if device.type == "cuda" else 1
        return [of(torch.randn(n, k, device=device, dtype=dtype) / k**0.5) for _ in range(count)]

    def seconds(call: Callable[[Any], object], weights: list[Any]) -> float:
        work = lambda: [call(weight) for weight in weights]  # noqa: E731
        taken = measure_replays(work) if device.type == "cuda" else timed(work, device, on_cpu=9)
        return taken.median / len(weights)

    own: dict[int, float] = {}
    dense = made(8 * dtype.itemsize, lambda w: w)
    xs = {rows: torch.randn(rows, k, device=device, dtype=dtype) for rows in asked.rows}
    for rows, x in xs.items():
        own[rows] = seconds(lambda w, x=x: torch.mm(x, w.t()), dense)
    del dense
    for name in asked.cases:
        weights = made(FORMATS[name][0], lambda w, name=name: laid_out(name, w, dtype))
        for rows, x in xs.items():
            for by in implementations(x, weights[0], asked.implementations):
                with dispatch.forced(by):
                    check(name, x, weights[0], by)
                    yield rows, name, by, seconds(lambda w, x=x: product(x, w), weights), own[rows]
    for name in (name for name in asked.cases if asked.peers and name in HUMMING):
        layers = made(FORMATS[name][0], lambda w, name=name: humming(name, w))
        for rows, x in xs.items():
            yield rows, f"humming {name}", "humming", seconds(lambda layer, x=x: layer(x), layers), own[rows]


def plotted(figures: list[dict[str, Any]], file: Path) -> None:
    """The mean ratio of the best implementation over the rows, a line a format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in dict.fromkeys(one["format"] for one in figures):
        best: dict[int, float] = {}
        for one in figures:
            if one["format"] == name:
                best[one["rows"]] = max(best.get(one["rows"], 0.0), one["mean"])
        axes.plot(list(best), list(best.values()), marker="o", label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="rows of x", ylabel="times torch's own product")
    axes.set_xticks(list(best), [str(rows) for rows in best])
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A line for each format and number of rows: the ratio of every shape, and their mean."""
    if asked.peers and (find_spec("humming") is None or device_of(asked).type != "cuda"):
        raise SystemExit("--peers humming: it needs a GPU of NVIDIA's and `pip install humming-kernels`")
    torch.manual_seed(0)
    shapes = SMALL if asked.tiny else LAYER
    asked.rows = asked.rows[:2] if asked.tiny else asked.rows
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    names: dict[tuple[str, int, str], dict[str, None]] = {}
    for which, n, k in shapes:
        for rows, name, by, taken, torchs in times(asked, n, k):
            line = name, rows, by if asked.implementations else ""
            found.setdefault(line, {})[which] = torchs / taken
            names.setdefault(line, {})[by] = None
    printed, figures = Table("Times torch's own product"), list[dict[str, Any]]()
    order = list(dict.fromkeys(name for name, _, _ in found))
    for line, ratios in sorted(found.items(), key=lambda one: (order.index(one[0][0]), one[0][1])):
        mean, by = statistics.fmean(ratios.values()), ", ".join(names[line])
        named = {f"times, {which}": ratios.get(which) for which, _, _ in shapes}
        printed.add({"format": line[0], "rows": line[1], "by": by, **named, "times, mean": mean})
        figures.append({"format": line[0], "rows": line[1], "by": by, "mean": mean, **ratios})
    if asked.plot:
        plotted(figures, asked.plot)
    return {"figures": figures}
