"""OPT in float16 beside OPT in int8 from end to end: memory and latency, prompts and decoding, as AMD's guide shows it.

    python scripts/bench_opt.py [--models opt-1.3b ... opt-13b] [--device cuda] [--prompt 2048] [--batches 1 16]
        [--repeats 5] [--json FILE] [--plot FILE]
    python scripts/bench_opt.py --draw FILE.json --plot FILE

Each model has the named shape and random weights in float16. It is timed as transformers runs it, then patched in place
by `smoothquant-opt` with its defaults (calibrated on its own text, verified, the originals freed), and timed again.
Its embeddings have a standard deviation of 1: the residual stream of a trained model is larger than what one layer adds
to it, and with transformers' 0.02 the first layers' rounding is most of their output.
--draw: draw the figures of an earlier run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench import plot
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.timing import once
from accelpatch.device import probe
from accelpatch.models import load

MODELS = ("opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b")
RECIPE = "smoothquant-opt"
KINDS = ("float16", "int8")
GB = 1e9


def figures(model: Any, prompt: int, batches: list[int], new: int, repeats: int) -> dict[str, Any]:
    """Medians of one engine: weights and peak in GB, seconds to the first token, tokens a second by batch."""
    device = next(model.parameters()).device
    ids = prompt_ids(model.config.vocab_size, Shape(1, prompt, 1)).to(device)
    found: dict[str, Any] = {"weights": memory(device)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first = [once(lambda: generate(model, ids, 1), device) for _ in range(repeats + 2)][2:]
    found |= {"first_token": statistics.median(first), "peak": memory(device, peak=True), "decode": {}}
    for batch in batches:
        some = prompt_ids(model.config.vocab_size, Shape(batch, 128, new)).to(device)
        more = []
        for _ in range(repeats + 2):
            one = once(lambda some=some: generate(model, some, 1), device)
            more.append(once(lambda some=some: generate(model, some, new), device) - one)
        found["decode"][str(batch)] = batch * (new - 1) / max(statistics.median(more[2:]), 1e-9)
    return found


def memory(device: torch.device, peak: bool = False) -> float:
    """GB in use on a GPU, or the most since the last reset; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    if peak:
        return torch.cuda.max_memory_allocated(device) / GB
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device) / GB


def measured(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Both engines' figures of a model."""
    model: Any = load.random(name, dtype=torch.float16, device=asked.device)
    for table in (model.get_input_embeddings(), model.model.decoder.embed_positions):
        torch.nn.init.normal_(table.weight)
    sizes = (min(asked.prompt, model.config.max_position_embeddings), asked.batches, asked.new, asked.repeats)
    found = {"float16": figures(model, *sizes)}
    accelpatch.patch(model, RECIPE, keep_original="none")
    report = model.accelpatch.report()
    layers = sum(site.replacer == "int8_opt" for site in report.sites)
    print(f"{name}: {layers} layers in int8, patched in {sum(report.seconds.values()):.1f} s; {report.verification}")
    found |= {"int8": figures(model, *sizes), "layers": layers}
    print(f"  {dict(model.accelpatch.report().paths)}")
    one, other = (found[kind] for kind in KINDS)
    if one["peak"]:
        print(f"  weights {one['weights']:.2f} -> {other['weights']:.2f} GB ({other['weights'] / one['weights']:.2f}), "
              f"peak {one['peak']:.2f} -> {other['peak']:.2f} ({other['peak'] / one['peak']:.2f})")  # fmt: skip
    print(f"  prompt of {sizes[0]}: {1e3 * one['first_token']:.1f} -> {1e3 * other['first_token']:.1f} ms "
          f"({one['first_token'] / other['first_token']:.2f})")  # fmt: skip
    for batch, rate in one["decode"].items():
        made = other["decode"][batch]
        print(f"  batch {batch}: {rate:.1f} -> {made:.1f} tokens/s ({made / rate:.2f})", flush=True)
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Memory, seconds to the first token, and time of a decoded token, by model."""
    from matplotlib.figure import Figure

    models, batch = record["models"], next(iter(next(iter(record["models"].values()))["int8"]["decode"]))
    panels = (
        ("weights and peak of a prompt, GB", lambda one: one["weights"], lambda one: one["peak"]),
        (f"first token, prompt of {record['prompt']}, ms", lambda one: 1e3 * one["first_token"], None),
        (f"a token, batch {batch}, ms", lambda one: 1e3 * int(batch) / one["decode"][batch], None),
    )
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, (title, value, above) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, (kind, colour) in enumerate(zip(KINDS, ("#9aa5b1", "#d1495b"), strict=True)):
            at = [row + 0.4 * (place - 0.5) for row in range(len(models))]
            heights = [value(one[kind]) for one in models.values()]
            if above is not None:
                axes.bar(at, [above(one[kind]) for one in models.values()], 0.36, color=colour, alpha=0.35)
            bars = axes.bar(at, heights, 0.36, color=colour, label=kind)
            axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
        axes.set_xticks(range(len(models)), [name.upper() for name in models], fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.12)
    figure.axes[0].legend(loc="upper left")
    title = f"OPT, float16 (transformers) and int8 ({RECIPE}), {record['device']}, {record['date']}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="Shapes, names of the catalog.")
    parser.add_argument("--device", default="cuda", help="Where they run.")
    parser.add_argument("--prompt", type=int, default=2048, help="Tokens of the prompt whose time is taken.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="Sequences that are decoded at once.")
    parser.add_argument("--new", type=int, default=64, help="New tokens of each.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed runs of each case.")
    parser.add_argument("--json", type=Path, help="A file for all figures.")
    parser.add_argument("--draw", type=Path, help="Figures of an earlier run, to be drawn.")
    parser.add_argument("--plot", type=Path, help="The picture.")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    if asked.plot:
        plot.check(asked.plot)
    if asked.draw:
        record = json.loads(asked.draw.read_text())
    else:
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        record = {"device": probe(asked.device).name, "date": day, "prompt": asked.prompt}
        record["models"] = {name: measured(name, asked) for name in asked.models}
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    if asked.plot:
        draw(record, asked.plot)


if __name__ == "__main__":
    main()
