"""Stock generate() on one GPU before and after a patch, beside its peers, all in one run and in turn.

    python scripts/bench_generate.py [--model llama2-7b] [--json FILE] [--profile] [--recipes exact compact int8 int4]
        [--peers eager static compiled tuned torchao-int8 torchao-int8-tuned torchao-int4 torchao-int4-tuned]
        [--cases 1x128 8x128 32x128 1x4096] [--case-peers static] [--prefill 32 128 512 2048] [--new 128] [--repeats 5]
        [--unverified] [--dtype bfloat16]

The model has the named shape and random 16-bit weights, made on the device. It is patched with the defaults, verified.
A case is batch x prompt; all peers run the first, `--case-peers` the others of a larger batch. Peers with a loop of
their own (benchmarks/generate_engines.py) are asked for by name: each takes a minute or more to compile. Each figure is
a median over `--repeats` turns, in which every engine runs once; the decode rate comes from the difference of a long
and a short answer. Its limit is the bytes of weights, scales and head, and of keys and values at the mean context, over
the rate of the device library's stream kernel. Before anything is timed, the logits of a prompt and of captured steps
are held to the float rule: at most twice as far from those in float32 as those of the stock loop over the same patched
modules (not those of a second engine that is patched with verify=False).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.generate_engines import LOOPS, Engine, cached_bytes, looping, ours, stock

from accelpatch.bench.generate import Shape, prompt_ids
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import once, synchronize
from accelpatch.models import load
from accelpatch.runtime.graphs.step import CAPTURED

SHORT = 16  # tokens of the short answer: past the first steps, which may find things cold
ROWS = 14  # of the profile's table
PEER_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError)


@dataclass(frozen=True)
class Case:
    """Sequences at once, and tokens of the prompt of each."""

    batch: int
    prompt: int

    @classmethod
    def read(cls, text: str) -> Case:
        batch, prompt = text.split("x")
        return cls(int(batch), int(prompt))

    def ids(self, base: Any, device: torch.device) -> Tensor:
        return prompt_ids(base.config.vocab_size, Shape(self.batch, self.prompt, 1)).to(device)


def logits_of(model: Any, ids: Tensor, by_stock: bool) -> list[Tensor]:
    """Logits of a prompt's end and of five steps by generate(), greedy."""
    before = model._accelpatch_runtime
    if by_stock:
        model._accelpatch_runtime = None
    made = model.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    model._accelpatch_runtime = before
    return [step.double() for step in made.logits]


def check(engine: Engine, ids: Tensor) -> tuple[float, float]:
    """Relative RMSE of the prompt's and captured steps' logits, and of the stock loop's, against float32.

    The worst of the steps, each row up to where its tokens part. Ends the program where the float rule breaks.
    """
    model, exact = engine.model, copy.deepcopy(engine.model)
    exact._accelpatch_runtime = None
    due, worst = logits_of(exact.float(), ids, True), [0.0, 0.0]
    del exact
    before = model.accelpatch.report().paths.get(CAPTURED, 0)
    for place, by_stock in enumerate((False, True)):
        alike = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        for mine, its in zip(logits_of(model, ids, by_stock), due, strict=True):
            error = ((mine - its)[alike].norm() / its[alike].norm()).item()
            worst[place] = max(worst[place], error if error == error else float("inf"))
            alike &= mine.argmax(-1) == its.argmax(-1)  # other tokens from here on
            if not alike.any():
                break
    steps = model.accelpatch.report().paths.get(CAPTURED, 0) - before
    if worst[0] > 2 * worst[1] + 2**-8 or (steps != 5 and ids.device.type == "cuda"):
        raise SystemExit(
            f"{engine.name}: {steps} captured steps of 5, relative RMSE {worst}: nothing is timed over red"
        )
    return worst[0], worst[1]


def turns(engines: Sequence[Engine], ids: Tensor, new: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a step of each engine, one each turn; an engine that fails is left out, with its error."""
    steps: dict[str, list[float]] = {}
    ready = []
    for engine in engines:
        begun = time.perf_counter()
        try:
            for count in (new, SHORT, new):  # the longest first: a static cache keeps its size, and what was compiled
                engine.call(ids, count)
            synchronize(ids.device)
            ready.append(engine)
            print(f"{engine.name}: warm after {time.perf_counter() - begun:.1f} s", flush=True)
        except PEER_ERRORS as error:  # must not cost the others their figures
            if engine.name.startswith("accelpatch"):
                raise
            print(f"{engine.name}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    for _ in range(repeats):
        for engine in ready:
            short = once(lambda e=engine: e.call(ids, SHORT), ids.device)
            long = once(lambda e=engine: e.call(ids, new), ids.device)
            steps.setdefault(engine.name, []).append((long - short) / (new - SHORT))
    return steps


def decode_rows(
    engines: Sequence[Engine], case: Case, ids: Tensor, new: int, repeats: int, limit: float
) -> list[dict[str, Any]]:
    """The figures of one case; tokens a second are those of all sequences together."""
    steps, rows = turns(engines, ids, new, repeats), []
    cache = case.batch * (case.prompt + (SHORT + new) / 2) * cached_bytes(engines[0].model)
    for engine in engines:
        if engine.name in steps:
            rates = sorted(case.batch / seconds for seconds in steps[engine.name])
            read = engine.bytes + cache
            rate = statistics.median(rates)
            rows.append({
                "engine": engine.name, "tok/s": rate, "low": rates[0], "high": rates[-1],
                "ms a step": 1e3 * case.batch / rate, "GB a step": read / 1e9,
                "share": rate / case.batch * read / limit,
            })  # fmt: skip
    print(f"\nbatch {case.batch}, prompt {case.prompt}, {new} new tokens\n")
    print("| engine | tok/s | slowest to fastest | ms a step | GB a step, with the cache | share of its limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['engine']} | {row['tok/s']:.1f} | {row['low']:.1f} to {row['high']:.1f} | "
              f"{row['ms a step']:.3f} | {row['GB a step']:.2f} | {row['share']:.1%} |", flush=True)  # fmt: skip
    return rows


def prefill_rows(
    engines: Sequence[Engine], base: Any, lengths: Sequence[int], repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Milliseconds of generate() for one token after prompts of these lengths."""
    found: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in engines}
    for length in lengths:
        ids = Case(1, length).ids(base, device)
        for engine in engines:
            for _ in range(3):
                engine.call(ids, 1)
        taken: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for _ in range(2 * repeats):
            for engine in engines:
                taken[engine.name].append(1e3 * once(lambda e=engine, ids=ids: e.call(ids, 1), device))
        for name, times in taken.items():
            found[name][str(length)] = [statistics.median(times), min(times), max(times)]
    print("\nprefill, ms of generate() for one token: median (fastest to slowest)\n")
    print("| engine | " + " | ".join(map(str, lengths)) + " |\n" + "| --- " * (len(lengths) + 1) + "|")
    for name, by_length in found.items():
        cells = (f"{middle:.1f} ({low:.1f} to {high:.1f})" for middle, low, high in by_length.values())
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return [{"engine": name, "ms": by_length} for name, by_length in found.items()]


def loop_over_replays(engine: Engine, ids: Tensor, step_seconds: float, count: int = 64) -> float | None:
    """Wall time of a decode step over that of the replays of its two graphs alone."""
    steps = getattr(engine.model._accelpatch_runtime, "_steps", {})
    step = next((one for (rows, _), one in reversed(steps.items()) if rows == len(ids)), None)
    if step is None or step.capacity < ids.shape[1] + count + 3:
        return None
    sampling = next(reversed(step.batch._samplers.values()))
    step.batch.slot.fill_(ids.shape[1])

    def replay(times: int) -> None:
        for _ in range(times):
            step.replay()
            sampling.replay()

    replay(3)
    return step_seconds * count / once(lambda: replay(count), ids.device)


def profile(call: Callable[[], object], title: str) -> dict[str, Any]:
    """Kernel time and launches of a call, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    rows = sorted(((e.key, e.self_device_time_total, e.count) for e in seen.key_averages()), key=lambda row: -row[1])
    print(f"\n{title}: {sum(row[1] for row in rows):.0f} us of kernels, {sum(row[2] for row in rows)} launches")
    for name, micros, count in rows[:ROWS]:
        print(f"  {micros:9.0f} us {count:6} x  {name[:100]}")
    return {"title": title, "rows": [{"kernel": n, "us": u, "launches": c} for n, u, c in rows[:40]]}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="The model whose shape is used (default: %(default)s).")
    parser.add_argument("--device", default="cuda", help="The device to run on (default: %(default)s).")
    parser.add_argument("--new", type=int, default=128, help="Tokens of the long answer (default: %(default)s).")
    parser.add_argument("--repeats", type=int, default=5, help="Timed turns of each engine (default: %(default)s).")
    peers = ["eager", "static", *LOOPS]
    parser.add_argument("--recipes", nargs="*", default=["exact", "compact", "int8", "int4"],
                        help="The recipes to patch with (default: %(default)s).")  # fmt: skip
    parser.add_argument("--peers", nargs="*", default=["eager", "static"], choices=peers,
                        help="Engines beside ours in the first case (default: %(default)s).")  # fmt: skip
    parser.add_argument("--case-peers", nargs="*", default=["static"], choices=["eager", "static"],
                        help="Engines beside ours in later cases of several rows (default: %(default)s).")  # fmt: skip
    cases = [Case(1, 128), Case(8, 128), Case(32, 128), Case(1, 4096)]
    parser.add_argument("--cases", nargs="*", type=Case.read, default=cases, metavar="BATCHxPROMPT",
                        help="Sequences and tokens of a prompt (default: 1x128 8x128 32x128 1x4096).")  # fmt: skip
    parser.add_argument("--prefill", nargs="*", type=int, default=[32, 128, 512, 2048], metavar="TOKENS",
                        help="Prompt lengths whose first token is timed (default: %(default)s).")  # fmt: skip
    parser.add_argument("--unverified", dest="verify", action="store_const", const=(True, False), default=(True,),
                        help="Time each recipe a second time, patched with verify=False.")  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"],
                        help="The type of the model's weights (default: %(default)s).")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures to this file.")
    parser.add_argument("--profile", action="store_true", help="Print the time of each kernel too.")
    return parser.parse_args()


def measured(asked: argparse.Namespace, base: Any, device: torch.device, limit: float) -> dict[str, Any]:
    """Everything that was asked for, printed as it comes."""
    first = asked.cases[0].ids(base, device)
    mine, notes = [], {}
    for verify in asked.verify:
        for recipe in asked.recipes:
            mine.append(ours(base, recipe, first, verify))
            notes[mine[-1].name] = dict(mine[-1].seconds)
            if verify:  # while there is room for its weights in float32
                notes[mine[-1].name]["logits error"] = check(mine[-1], first)
    print(json.dumps(notes, indent=1), flush=True)
    gc.collect()
    theirs = [stock(base, name) for name in asked.peers if name not in LOOPS]
    found: dict[str, Any] = {"notes": notes, "decode": {}}
    eager = [engine for engine in theirs if engine.name == "HF eager"]
    found["prefill"] = prefill_rows([*eager, *mine], base, asked.prefill, asked.repeats, device)
    for place, case in enumerate(asked.cases):
        ids = case.ids(base, device)
        rest = [stock(base, name) for name in asked.case_peers] if case.batch > 1 else eager
        beside = (*theirs, *loops(asked, base, case)) if place == 0 else rest
        rows = decode_rows([*beside, *mine], case, ids, asked.new, asked.repeats, limit)
        found["decode"][f"{case.batch}x{case.prompt}"] = rows
        for engine in mine if place == 0 else ():
            step = next(row["ms a step"] for row in rows if row["engine"] == engine.name) / 1e3
            notes[engine.name]["loop over replays"] = loop_over_replays(engine, ids, step)
    print(json.dumps(notes, indent=1))
    if asked.profile:
        found["profiles"] = [profile(lambda e=e: e.call(first, 20), f"{e.name}, prompt and 20 tokens") for e in mine]
    return found


def loops(asked: argparse.Namespace, base: Any, case: Case) -> list[Engine]:
    """The peers with a loop of their own, as many as are here."""
    found = []
    for name in asked.peers:
        if name in LOOPS:
            try:
                found.append(looping(base, name, case.prompt + asked.new))
            except ImportError as error:
                print(f"{name}: left out: {error}", flush=True)
    return found


def main() -> None:
    """Check, time, print."""
    asked = arguments()
    device = torch.device(asked.device)
    limit = read_limit(device)
    base: Any = load.random(asked.model, dtype=getattr(torch, asked.dtype), device=device)
    base.generation_config.eos_token_id = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{asked.model}, {name}, torch {torch.__version__}, read limit {limit.bytes_per_second / 1e12:.3f} TB/s "
          f"({limit.method})", flush=True)  # fmt: skip
    found = measured(asked, base, device, limit.bytes_per_second)
    if asked.json:
        facts = {k: str(v) for k, v in vars(asked).items()} | {"device_name": name, "read_limit": asdict(limit)}
        asked.json.write_text(json.dumps({"run": facts, **found}, indent=1))


if __name__ == "__main__":
    main()
