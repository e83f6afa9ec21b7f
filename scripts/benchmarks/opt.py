"""OPT in float16 beside OPT in int8 from end to end: memory and latency, prompts and decoding, as AMD's guide has it.

    python scripts/bench.py opt [--models opt-1.3b ... opt-13b] [--device cuda] [--cases 1x2048+1 1x128+64 16x128+64]
        [--repeats 5] [--json FILE] [--plot FILE]
    python scripts/bench.py opt --draw FILE.json --plot FILE

Each model has the named shape and random weights in float16. It is timed as transformers runs it, then patched in place
by `smoothquant-opt` with its defaults (calibrated on its own text, verified, the originals freed), and timed again.
As in a trained model, the residual stream is larger than what one layer adds to it: embeddings of positions have a
standard deviation of 1, and what is added is divided by sqrt(2 layers), as GPT-2 begins. With transformers' 0.02 for
all the rounding of some layers is a sixth of their output, and they stay float.
--draw: draw the figures of an earlier run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accelpatch.bench import plot
from scripts.benchmarks.engines import Engine, allocated, answers, figures, freed, patched, random_model, stock, title
from scripts.benchmarks.harness import Case, Option, cases, common, table

MODELS = ["opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b"]
CASES = [Case(1, 2048, 1), Case(1, 128, 64), Case(16, 128, 64)]
RECIPE, KINDS = "smoothquant-opt", ("float16", "int8")
OPTIONS = (
    Option("models", MODELS, "The models whose shapes are used, names of the catalog."), cases(CASES),
    *common(device="cuda", repeats=5),
    Option("draw", None, "Figures of an earlier run, to be drawn.", kind=Path, metavar="FILE"),
    Option("plot", None, "Draw the figures (.png, .svg, .pdf).", kind=Path, metavar="FILE"),
)  # fmt: skip
WARM_UP = 2


def model_of(name: str, asked: argparse.Namespace) -> Any:
    """Random weights, with a residual stream as a trained model has it."""
    model = random_model(argparse.Namespace(model=name, device=asked.device), dtype=torch.float16, endless=False)
    decoder = model.model.decoder
    torch.nn.init.normal_(decoder.embed_positions.weight)
    with torch.no_grad():
        for layer in decoder.layers:
            for last in (layer.self_attn.out_proj, layer.fc2):
                last.weight.div_((2 * len(decoder.layers)) ** 0.5)
    return model


def timed(engine: Engine, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a case. Prompts are no longer than the model's positions."""
    device, rows = torch.device(asked.device), []
    for case in asked.cases:
        case = replace(case, prompt=min(case.prompt, engine.model.config.max_position_embeddings))
        weights = allocated(device)
        if weights is not None:
            torch.cuda.reset_peak_memory_stats(device)
        taken = answers({engine.name: engine}, case.ids(engine.model), case.new, asked.repeats, WARM_UP)
        (row,) = figures(case, taken)
        rows.append(row | {"weights, GB": weights, "peak, GB": allocated(device, peak=True)})
    return rows


def measured(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Both engines' figures of a model, case by case."""
    model = model_of(name, asked)
    before = timed(stock(model, KINDS[0]), asked)
    engine = patched(model, RECIPE, KINDS[1], keep=False)
    report = model.accelpatch.report()
    layers = sum(site.replacer == "int8_opt" for site in report.sites)
    print(f"{name}: {layers} layers in int8, worst format error {report.verification.worst_format_error:.3f}, "
          f"KL {report.verification.kl:.2g}")  # fmt: skip
    found: dict[str, Any] = {"layers": layers}
    for case, one, other in zip(asked.cases, before, timed(engine, asked), strict=True):
        for label, sign in (("first token, ms", -1), ("tok/s", 1), ("weights, GB", 1), ("peak, GB", 1)):
            if one.get(label):
                one[f"{label.split(',')[0]}, times"] = 1.0
                other[f"{label.split(',')[0]}, times"] = (other[label] / one[label]) ** sign
        found[str(case)] = table([one, other], f"{name}, {title(case, asked.repeats, WARM_UP)}")
    print(f"  {dict(model.accelpatch.report().paths)}")
    del model, engine
    freed()
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Memory, milliseconds to the first token, and of a decoded token, by model."""
    from matplotlib.figure import Figure

    models = record["models"]
    prompt, decode = [case for case in next(iter(models.values())) if case != "layers"][:2]
    panels: tuple[tuple[str, str, Callable[[dict[str, Any]], float], Callable[[dict[str, Any]], float] | None], ...] = (
        ("weights and peak of a prompt, GB", prompt, lambda row: row["weights, GB"], lambda row: row["peak, GB"]),
        (f"first token, {prompt}, ms", prompt, lambda row: row["first token, ms"], None),
        (f"a step, {decode}, ms", decode, lambda row: row["ms a step"], None),
    )
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, (name, case, value, above) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, colour in enumerate(plot.COLORS.values()):
            rows = [one[case][place] for one in models.values()]
            at = [row + 0.4 * (place - 0.5) for row in range(len(models))]
            if above is not None:
                axes.bar(at, [above(row) for row in rows], 0.36, color=colour, alpha=0.35)
            drawn = axes.bar(at, [value(row) for row in rows], 0.36, color=colour, label=KINDS[place])
            axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=2)
        axes.set_xticks(range(len(models)), [one.upper() for one in models], fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.margins(y=0.12)
    figure.axes[0].legend(loc="upper left")
    run = record["run"]
    figure.suptitle(f"OPT, float16 (transformers) and int8 ({RECIPE}), {run['device']}, {run['date']}", fontsize=11)
    figure.savefig(path, dpi=120)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure, or read; draw."""
    if asked.plot:
        plot.check(asked.plot)
    if asked.draw:
        record = json.loads(asked.draw.read_text())
    else:
        record = {"run": asked.facts, "models": {name: measured(name, asked) for name in asked.models}}
    if asked.plot:
        draw(record, asked.plot)
    return {"models": record["models"]}
