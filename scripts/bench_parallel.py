"""Models that accelerate spreads over GPUs, or offloads to the CPU and the disk: tokens a second, patched and not.

    python scripts/bench_parallel.py [--model llama2-7b] [--dtype bfloat16] [--recipes exact int4] [--maps one auto ...]
        [--new 64] [--offloaded-new 8] [--repeats 3] [--part 0.25] [--folder FOLDER] [--tiny] [--json FILE]

One row a map: `one` is the first GPU alone; `auto`, `balanced`, `balanced_low_0` and `sequential` are accelerate's maps
over two GPUs, with room for a little more than half of the model on each (`auto` without that, as it is by default);
`hand` has the ends on the first GPU and the first half of the layers on the second; `cpu` and `disk` have the last
`--part` of the layers, the last norm and the head offloaded there from one GPU. In each map the model runs unpatched
first, and each recipe's logits of a prompt are compared with those of the same recipe on one device. `of one`: the rate
over that of the same recipe on one GPU. `of stock`: over the unpatched model's in the same map. Random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.models import load

GPU_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "hand")
OFFLOADED = ("cpu", "disk")
STOCK = "unpatched"
ROOM = 0.58  # of the model's bytes, for each of two GPUs
LOW = 0.75  # and for the second one, where the first gets what is left
BOUND = 0.02  # relative RMSE of a prompt's logits, against the same recipe on one device
TINY = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PROMPT = 32


def model_of(asked: argparse.Namespace) -> Any:
    """The model on the first device."""
    if asked.tiny:
        torch.manual_seed(0)
        made: Any = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    else:
        made = load.random(asked.model, dtype=getattr(torch, asked.dtype), device="cuda:0")
    made.generation_config.eos_token_id = None
    return made


def ends_of(model: Any) -> dict[str, Any]:
    """The parts beside the layers."""
    return dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)


def layout(kind: str, model: Any, part: float) -> dict[str, Any] | None:
    """The map of a kind; None for one device."""
    layers = [f"model.layers.{place}" for place in range(len(model.model.layers))]
    if kind == "one":
        return None
    if kind in OFFLOADED:
        kept = len(layers) - max(1, round(part * len(layers)))
        off = dict.fromkeys((*layers[kept:], "model.norm", "lm_head"), kind)
        return ends_of(model) | dict.fromkeys(layers[:kept], 0) | off
    if kind == "hand":
        half = len(layers) // 2
        return ends_of(model) | dict.fromkeys(layers[:half], 1) | dict.fromkeys(layers[half:], 0)
    whole = sum(p.nbytes for p in model.parameters())
    room: Any = {0: int(ROOM * whole), 1: int(ROOM * whole)}
    names = list(model._no_split_modules)
    if kind != "sequential":
        low = kind == "balanced_low_0"
        room = None if kind == "auto" else {0: whole, 1: int(LOW * whole)} if low else room
        room = get_balanced_memory(model, room, names, low_zero=low)
        if low:  # or a layer that falls between the two would be offloaded
            room[0] += 2 * sum(p.nbytes for p in model.model.layers[0].parameters())
    found: dict[str, Any] = infer_auto_device_map(model, room, no_split_module_classes=names)
    return found


def spread(model: Any, kind: str, asked: argparse.Namespace, folder: str) -> Any:
    """The model, spread by a map."""
    places = layout(kind, model, asked.part)
    if places is None:
        return model
    first: Any = "cpu" if asked.tiny else 0
    places = {name: first if place == 0 else place for name, place in places.items()}
    if kind in OFFLOADED:
        model.to("cpu")  # accelerate leaves weights that it offloads to "cpu" where they are
    return dispatch_model(model, places, main_device=first, offload_dir=folder, force_hooks=True)


def prompt_of(model: Any, asked: argparse.Namespace) -> dict[str, Tensor]:
    """One prompt of PROMPT ids."""
    ids = torch.randint(5, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    ids = ids.to("cpu" if asked.tiny else "cuda:0")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A prompt's logits in float32, on the CPU."""
    with torch.no_grad():
        found: Tensor = model(**batch).logits
    return found.float().cpu()


def apart(found: Tensor, due: Tensor) -> float:
    """Relative RMSE."""
    return float((found - due).norm() / due.norm())


class Clock:
    """A streamer that notes when each token comes; the first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """A token is there."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All are."""


def timed(model: Any, kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of greedy generate(), from the first new token of a call to its last: the median of the calls,
    and (fastest - slowest) / median."""
    batch, many = prompt_of(model, asked), asked.offloaded_new if kind in OFFLOADED else asked.new
    rates = []
    for _ in range(asked.repeats + 1):
        clock = Clock()
        model.generate(**batch, max_new_tokens=many, min_new_tokens=many, do_sample=False, streamer=clock)
        new = clock.times[1:]
        rates.append((len(new) - 1) / (new[-1] - new[0]))
    rates = rates[1:]  # the first call captures
    middle = statistics.median(rates)
    return {"tokens_s": middle, "spread": (max(rates) - min(rates)) / middle, "rates": rates}


def way_of(model: Any) -> str:
    """How the patched model's steps ran, most often."""
    paths = {path: count for path, count in model.accelpatch.report().paths.items() if "prefill" not in path}
    ways = [path for path in paths if not path.startswith(("captured step", "modules: a prompt"))]
    return max(ways, key=lambda path: paths[path], default="modules")


def rows_of(kind: str, asked: argparse.Namespace, folder: str, due: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The figures of one map. due: recipe -> logits on one device, which the map `one` fills in."""
    model = spread(model_of(asked), kind, asked, folder)
    batch, rows = prompt_of(model, asked), []
    for place, recipe in enumerate((STOCK, *asked.recipes)):
        row: dict[str, Any] = {"map": kind, "engine": recipe}
        start = time.perf_counter()
        if recipe != STOCK:
            last = place == len(asked.recipes)
            accelpatch.patch(model, recipe, keep_original="none" if last and kind not in OFFLOADED else "cpu")
            row["failures"] = model.accelpatch.report().verification.failures
        row["patch_s"] = time.perf_counter() - start
        found = logits(model, batch)
        row["apart"] = apart(found, due.setdefault(recipe, found))
        row |= timed(model, kind, asked)
        row["way"] = "" if recipe == STOCK else way_of(model)
        rows.append(row)
        print(
            json.dumps({name: row[name] for name in ("map", "engine", "tokens_s", "spread", "apart", "way")}),
            flush=True,
        )
        if recipe != STOCK and place < len(asked.recipes):
            accelpatch.unpatch(model)
    return rows


def shown(rows: list[dict[str, Any]]) -> str:
    """The table."""
    rates = {(row["map"], row["engine"]): row["tokens_s"] for row in rows}
    lines = ["| map | engine | tok/s | spread | of one | of stock | apart | by |", "|" + " --- |" * 8]
    for row in rows:
        one, stock = rates.get(("one", row["engine"])), rates[row["map"], STOCK]
        over = "" if one is None else f"{row['tokens_s'] / one:.2f}"
        bad = " (over the bound)" if row["apart"] > BOUND or row.get("failures") else ""
        lines.append(
            f"| {row['map']} | {row['engine']} | {row['tokens_s']:.1f} | {row['spread']:.0%} | {over} | "
            f"{row['tokens_s'] / stock:.2f} | {row['apart']:.1e}{bad} | {row['way']} |"
        )
    return "\n".join(lines)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    maps = ["one", *GPU_MAPS, *OFFLOADED]
    parser.add_argument("--model", default="llama2-7b", help="The model whose shape is used (default: %(default)s).")
    parser.add_argument("--dtype", default="bfloat16", help="The type of the weights (default: %(default)s).")
    parser.add_argument("--recipes", nargs="*", default=["exact", "int4"],
                        help="The recipes to patch with (default: %(default)s).")  # fmt: skip
    parser.add_argument("--maps", nargs="*", default=maps, choices=maps, help="The maps (default: all).")
    parser.add_argument("--new", type=int, default=64, help="Tokens of a call of generate() (default: %(default)s).")
    parser.add_argument("--offloaded-new", type=int, default=8,
                        help="The same where weights are offloaded (default: %(default)s).")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="Timed calls of each (default: %(default)s).")
    parser.add_argument("--part", type=float, default=0.25,
                        help="The part of the layers that is offloaded (default: %(default)s).")  # fmt: skip
    parser.add_argument("--folder", help="Where offloaded weights are written (default: a temporary folder).")
    parser.add_argument("--tiny", action="store_true", help="A tiny model on the CPU, to try the program.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures to this file.")
    return parser.parse_args(words)


def main() -> None:
    """Print, and write what was asked for. Exit status 1 where logits differ, or a site is over its bound."""
    asked = arguments()
    gpus = 0 if asked.tiny else torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(gpus)} or {"CPU"}
    print(f"{asked.model}, {asked.dtype}, {max(gpus, 1)} x {', '.join(sorted(names))}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    due: dict[str, Tensor] = {}
    for kind in asked.maps:
        if kind in GPU_MAPS and gpus < 2:
            print(f"{kind}: it needs two GPUs", flush=True)
            continue
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            rows += rows_of(kind, asked, folder, due)
        gc.collect()
        if gpus:
            torch.cuda.empty_cache()
    print(shown(rows))
    if asked.json:
        asked.json.write_text(json.dumps({"run": {k: str(v) for k, v in vars(asked).items()}, "rows": rows}, indent=1))
    sys.exit(int(any(row["apart"] > BOUND or row.get("failures") for row in rows)))


if __name__ == "__main__":
    main()
