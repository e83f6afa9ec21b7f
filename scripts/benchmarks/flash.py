"""Every implementation of flash_attention that runs here, by length of the sequences; parity comes first.

TFLOP/s are medians of graph replays, without the host's time, of the pairs of query and key that are seen. q, k and v
lie in memory as a model's linear layers leave them. "chosen" is the dispatcher's choice; its share is that of the
fastest one. Cases: causal; all keys; the last quarter of a prompt, whose other keys are cached; one token more; rows
with padding before their first key; a window of a quarter.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention.cases import Call, made
from accelpatch.kernels.ops.attention.flash_attention import OP, spec
from scripts.benchmarks.harness import PLOT, TINY, Option, Table, cases, common, device_of
from scripts.benchmarks.kernels import check, timed

DTYPE = torch.bfloat16
CHECKED = {
    "causal": Call(2, 4, 2, 300, 300, 128), "last": Call(1, 4, 2, 2048, 4500, 128),
    "heads-of-80": Call(1, 2, 2, 129, 129, 80), "all": Call(1, 4, 1, 200, 333, 64, causal=False),
    "window": Call(1, 2, 1, 400, 400, 64, window=100), "left": Call(3, 4, 2, 257, 257, 128, hidden="left"),
    "packed": Call(1, 4, 2, 500, 500, 64, hidden="packed"),
    "softcap": Call(1, 4, 2, 200, 200, 256, softcap=20.0, sinks=True),
    "bias": Call(1, 2, 2, 200, 200, 64, bias="float"), "mask": Call(2, 2, 2, 130, 260, 64, causal=False, bias="bool"),
}  # fmt: skip
LARGEST_SCORES = 8 << 30  # bytes of the matrix of scores that `eager` is timed with
OURS, PEER = "triton", "sdpa_flash"
NAMES = list(dispatch.kernel(OP).implementations)
OPTIONS = (
    cases(["causal"], choices=["causal", "all", "last", "step", "padded", "window"]),
    Option("sizes", [64, 128], "Head sizes."), Option("heads", 32, "Heads of queries."),
    Option("kv_heads", [32, 8], "Heads of keys."),
    Option("lengths", [2048, 4096, 8192, 16384, 32768], "Tokens of a sequence."),
    Option("tokens", 32768, "Tokens of a batch at least."), *common(repeats=12),
    Option("only", [], "Implementations in place of all that run here.", NAMES), PLOT, TINY,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A call that is timed."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    kind: str

    @property
    def queries(self) -> int:
        return {"last": self.length // 4, "step": 1}.get(self.kind, self.length)

    @property
    def window(self) -> int:
        return self.length // 4 if self.kind == "window" else 0

    @property
    def padding(self) -> list[int]:
        """Tokens of padding of each row."""
        return [row * self.length // (2 * self.batch) for row in range(self.batch)]

    @property
    def flops(self) -> float:
        pairs = float(self.batch * self.queries * self.length)
        if self.kind == "padded":
            pairs = sum((self.length - one) ** 2 / 2 for one in self.padding)
        elif self.kind == "window":
            pairs = self.batch * (self.length - self.window / 2) * self.window
        elif self.kind != "all":
            pairs -= self.batch * self.queries**2 / 2
        return 4.0 * self.heads * pairs * self.size

    def arguments(self, device: torch.device) -> tuple[object, ...]:
        """As the linear layers of a model leave them: tokens before heads."""

        def random(heads: int, length: int) -> Tensor:
            return torch.randn(self.batch, length, heads, self.size, device=device, dtype=DTYPE).transpose(1, 2)

        ranges = None
        if self.kind == "padded":
            high = torch.arange(1, self.length + 1, dtype=torch.int32).expand(self.batch, -1)
            ranges = torch.stack((torch.tensor(self.padding)[:, None].expand_as(high), high), -1).int().to(device)
        q, k, v = random(self.heads, self.queries), *(random(self.kv_heads, self.length) for _ in range(2))
        return (q, k, v, ranges, None, None, self.kind != "all", self.window, 0.0, self.size**-0.5)


def rates(shape: Shape, names: list[str], device: torch.device, repeats: int) -> Iterator[tuple[str, float, float]]:
    """(name, TFLOP/s, spread) of each implementation that runs the shape here."""
    args: Any = shape.arguments(device)
    scores = 2 * shape.batch * shape.heads * shape.queries * shape.length * DTYPE.itemsize
    for name in names:
        large = name == "eager" and scores > LARGEST_SCORES
        if not large and dispatch.why_not(OP, name, spec(*args), probe(device)) is None:
            run = functools.partial(dispatch.kernel(OP).implementations[name].run, *args)
            taken = timed(run, device, repeats, repeats)
            yield name, shape.flops / taken.median / 1e12, taken.spread


def measured(shapes: list[Shape], names: list[str], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Print a row for each shape; the figures."""
    printed, figures = Table(f"TFLOP/s, median of {repeats} replays"), []
    for shape in shapes:
        found = {name: (rate, spread) for name, rate, spread in rates(shape, names, device, repeats)}
        by_name, arguments = {name: rate for name, (rate, _) in found.items()}, shape.arguments(torch.device("meta"))
        chosen = dispatch.choose(OP, spec(*arguments), probe(device))  # type: ignore[arg-type]
        both = {OURS, PEER} <= by_name.keys()
        printed.add(
            {"kind": shape.kind, "batch": shape.batch, "KV heads": shape.kv_heads, "D": shape.size}
            | {"length": shape.length} | {name: by_name.get(name) for name in names}
            | {"spread": max((spread for _, spread in found.values()), default=0.0)}
            | {f"ratio {OURS} / {PEER}": by_name[OURS] / by_name[PEER] if both else None, "chosen": chosen}
            | {"its share": by_name[chosen] / max(by_name.values()) if chosen in by_name else None}
        )  # fmt: skip
        figures.append({**asdict(shape), "tflops": by_name, "chosen": chosen})
    return figures


def draw(figures: list[dict[str, Any]], path: Path, title: str) -> None:
    """TFLOP/s against length: a plot for each head size and number of KV heads, a line for each implementation."""
    from matplotlib.figure import Figure

    panels: dict[str, list[dict[str, Any]]] = {}
    for one in figures:
        panels.setdefault(f"{one['kind']}, heads of {one['size']}, {one['kv_heads']} of keys", []).append(one)
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (label, held) in zip(every, panels.items(), strict=True):
        for name in dict.fromkeys(name for one in held for name in one["tflops"]):
            points = [(one["length"], one["tflops"][name]) for one in held if name in one["tflops"]]
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == OURS else 1.2)
        lengths = sorted({one["length"] for one in held})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{one >> 10}k" if one >= 1024 else str(one) for one in lengths])
        axes.set(title=label, xlabel="tokens of a sequence", ylim=(0, None))
    every[0].set_ylabel("TFLOP/s")
    every[-1].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, time, draw."""
    if asked.tiny:
        asked.heads, asked.kv_heads, asked.tokens, asked.repeats = 4, [4, 2], 256, 2
        asked.lengths, asked.sizes = [64, 128], [32]
    device = device_of(asked)
    torch.manual_seed(0)
    names = [name for name in NAMES if not asked.only or name in asked.only]
    shapes = [
        Shape(max(1, asked.tokens // length), asked.heads, kv_heads, length, size, kind)
        for kind, size, kv_heads, length in itertools.product(asked.cases, asked.sizes, asked.kv_heads, asked.lengths)
    ]  # fmt: skip
    checked = [(name, call) for name, call in CHECKED.items() if not asked.tiny or call.length * call.keys < 50_000]
    with torch.inference_mode():
        draw_of = torch.Generator().manual_seed
        check(OP, ((name, made(call, draw_of(0), DTYPE, device)) for name, call in checked), device, names)
        figures = measured(shapes, names, device, asked.repeats)
    if asked.plot:
        about = f"{probe(device).name}, torch {torch.__version__}, {str(DTYPE).removeprefix('torch.')}, "
        draw(figures, asked.plot, about + " and ".join(asked.cases))
    return {"figures": figures}
