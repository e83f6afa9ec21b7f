"""Stock generate() on one GPU before and after a patch, beside its peers, all in one run and in turn.

    python scripts/bench_generate.py [--model llama2-7b] [--prompt 128] [--new 128] [--repeats 5] [--recipes exact int8]
                                     [--peers eager static] [--json FILE] [--profile]

The model has the named shape and random bf16 weights, made on the device. Peers: `eager`, Hugging Face's generate() as
it is, and `static`, the same with cache_implementation="static", which it compiles. Each figure is a median over
`--repeats` turns; the decode rate comes from the difference of a long and a short answer. Before anything is timed,
the logits of captured steps are held to the float rule: at most twice as far from those in float32 as those of the
stock loop over the same patched modules.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.generate import Shape, prompt_ids
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import once
from accelpatch.models import load
from accelpatch.runtime.captured_runtime import CAPTURED

SHORT = 16  # tokens of the short answer: past the first steps, which may find things cold
ROWS = 12  # of the profile's table


@dataclass
class Engine:
    """call(new): generates so many tokens. bytes: of weights a token reads."""

    name: str
    call: Callable[[int], Tensor]
    bytes: int
    short: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def figures(self, limit: float) -> dict[str, Any]:
        """Tokens a second (median, slowest, fastest), and the share of the read limit."""
        rates = sorted(1 / seconds for seconds in self.step)
        rate = statistics.median(rates)
        return {
            "engine": self.name, "tok_s": rate, "low": rates[0], "high": rates[-1], "ms_a_step": 1000 / rate,
            "bytes_a_token": self.bytes, "share": rate * self.bytes / limit,
            "short_answer_ms": 1000 * statistics.median(self.short),
        }  # fmt: skip


def caller(model: Any, ids: Tensor, **options: Any) -> Callable[[int], Tensor]:
    """Exactly so many greedy tokens after `ids` by the model's own generate()."""

    def call(new: int) -> Tensor:
        made: Tensor = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            **options,
        )  # fmt: skip
        assert made.shape[1] == ids.shape[1] + new
        return made

    return call


def read_bytes(model: nn.Module) -> int:
    """What a token reads of a plain model's weights: all but the rows of the embedding that it does not use."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    tied = model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    return every if tied else every - embedding.numel() * embedding.element_size()


def logits_of(model: Any, ids: Tensor, stock: bool) -> list[Tensor]:
    """Logits of five steps by generate(), greedy."""
    before = model._accelpatch_runtime
    if stock:
        model._accelpatch_runtime = None
    made = model.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    model._accelpatch_runtime = before
    return [step.double() for step in made.logits[1:]]


def check(model: Any, ids: Tensor, recipe: str) -> tuple[float, float]:
    """Relative RMSE of a captured step's logits, and of the stock loop's over the same modules, against float32.

    The worst of the steps up to where tokens part. Ends the program where the float rule breaks.
    """
    exact: Any = copy.deepcopy(model)
    exact._accelpatch_runtime = None
    due, worst = logits_of(exact.float(), ids, True), [0.0, 0.0]
    del exact
    torch.cuda.empty_cache()
    for place, stock in enumerate((False, True)):
        for mine, its in zip(logits_of(model, ids, stock), due, strict=True):
            error = ((mine - its).norm() / its.norm()).item()
            worst[place] = max(worst[place], error if error == error else float("inf"))
            if mine.argmax() != its.argmax():
                break  # other tokens from here on
    steps = model.accelpatch.report().paths[CAPTURED]
    if worst[0] > 2 * worst[1] + 2**-8 or steps != 5:
        raise SystemExit(f"{recipe}: {steps} captured steps of 5, relative RMSE {worst}: nothing is timed over red")
    return worst[0], worst[1]


def ours(base: nn.Module, recipe: str, ids: Tensor) -> tuple[Engine, tuple[float, float], dict[str, float]]:
    """A patched copy of `base`; its error and the stock loop's; seconds of the patch and of the first answer."""
    begun = time.perf_counter()
    model: Any = copy.deepcopy(base)
    copied = time.perf_counter()
    accelpatch.patch(model, recipe, verify=False, keep_original="none")
    patched = time.perf_counter()
    worst = check(model, ids, recipe)
    seconds = {"copy": copied - begun, "patch": patched - copied, "check": time.perf_counter() - patched}
    return Engine(f"accelpatch {recipe}", caller(model, ids), model.accelpatch.report().token_bytes[1]), worst, seconds


def profile(engine: Engine, new: int = 20) -> dict[str, Any]:
    """Kernel time and launches of a step, by kernel, from the difference of nothing: a run of `new` tokens in all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        engine.call(new)
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / new, e.count / new) for e in seen.key_averages()]
    rows.sort(key=lambda row: -row[1])
    print(
        f"\n{engine.name}: {sum(r[1] for r in rows):.0f} us of kernels a token, {sum(r[2] for r in rows):.0f} launches"
    )
    for name, micros, count in rows[:ROWS]:
        print(f"  {micros:8.1f} us {count:7.1f} x  {name[:110]}")
    return {"engine": engine.name, "rows": [{"kernel": n, "us": u, "launches": c} for n, u, c in rows[:40]]}


def turns(engines: list[Engine], repeats: int, new: int, device: torch.device) -> None:
    """Every engine once untimed, then `repeats` turns of a short and a long answer each."""
    for engine in engines:
        begun = time.perf_counter()
        engine.call(SHORT)
        engine.call(new)
        print(f"{engine.name}: first answers after {time.perf_counter() - begun:.1f} s", flush=True)
    for _ in range(repeats):
        for engine in engines:
            short = once(lambda e=engine: e.call(SHORT), device)
            engine.short.append(short)
            engine.step.append((once(lambda e=engine: e.call(new), device) - short) / (new - SHORT))


def table(rows: list[dict[str, Any]]) -> None:
    """The figures as text."""
    print("\n| engine | tok/s | slowest to fastest | ms a step | GB a token | share of the read limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['engine']} | {row['tok_s']:.1f} | {row['low']:.1f} to {row['high']:.1f} | "
            f"{row['ms_a_step']:.3f} | {row['bytes_a_token'] / 1e9:.2f} | {row['share']:.1%} |"
        )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--device", default="cuda")
    for name, default in (("prompt", 128), ("new", 128), ("repeats", 5), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", nargs="*", default=["exact", "int8", "int4"])
    parser.add_argument("--peers", nargs="*", default=["eager", "static"], choices=["eager", "static"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Check, time, print."""
    asked = arguments()
    device = torch.device(asked.device)
    limit = read_limit(device).bytes_per_second
    base: Any = load.random(asked.model, dtype=torch.bfloat16, device=device)
    base.generation_config.eos_token_id = None
    ids = prompt_ids(base.config.vocab_size, Shape(asked.batch, asked.prompt, asked.new)).to(device)
    extra: dict[str, dict[str, Any]] = {"eager": {}, "static": {"cache_implementation": "static"}}
    engines, notes = (
        [Engine(f"HF {name}", caller(base, ids, **extra[name]), read_bytes(base)) for name in asked.peers],
        {},
    )
    for recipe in asked.recipes:
        engine, worst, seconds = ours(base, recipe, ids)
        engines.append(engine)
        notes[engine.name] = {"logits_error": worst, **seconds}
        print(f"{engine.name}: {json.dumps(notes[engine.name])}", flush=True)
    turns(engines, asked.repeats, asked.new, device)
    rows = [engine.figures(limit) for engine in engines]
    profiles = [profile(e) for e in engines if e.name.startswith("accelpatch")] if asked.profile else []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"\n{asked.model}, batch {asked.batch}, prompt {asked.prompt}, {asked.new} new tokens, {name}, torch "
          f"{torch.__version__}, read limit {limit / 1e12:.3f} TB/s")  # fmt: skip
    table(rows)
    if asked.json:
        facts = {k: str(v) for k, v in vars(asked).items()} | {"device_name": name, "read_limit": limit}
        asked.json.write_text(
            json.dumps({"run": facts, "engines": rows, "notes": notes, "profiles": profiles}, indent=1)
        )


if __name__ == "__main__":
    main()
