"""Stock generate() on one GPU before and after a patch, beside its peers, all in one run and in turn.

    python scripts/bench.py generate [--model llama2-7b] [--cases 1x128 8x128] [--recipes exact compact int8 int4]
        [--peers eager static compiled tuned torchao-int8 torchao-int8-tuned torchao-int4 torchao-int4-tuned]
        [--case-peers static] [--repeats 5] [--unverified] [--plugin FILE]
        [--dtype bfloat16]

The model has the named shape and random 16-bit weights, made on the device. It is patched with the defaults, verified.
A case of one new token is the prefill, twice `--repeats` turns of HF eager and ours. All peers run the first other
case, `--case-peers` the further ones of several sequences. The decode rate is that of the difference of a long answer
and one of 16 tokens. Its limit is the bytes of weights, scales and head, and of keys and values at the mean context,
over the read limit of the run. Before anything is timed, the logits of a prompt and of captured steps are held to the
float rule: at most twice as far from those in float32 as those of the stock loop over the same patched modules (not
those of a second engine that is patched with verify=False).

The peers' loop is gpt-fast's: one token's step over a static cache, compiled by torch and captured, and no look at the
tokens between steps. "compiled" has the settings of `torch.compile(mode="reduce-overhead")`; "tuned" searches for the
best form of each kernel on top, as gpt-fast and torchao ask for. torchao quantises the weights of four of them; without
it they are left out. Each engine states its settings itself: those that torchao sets would hold for all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.bench.generate import cached_bytes
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import once, synchronize
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.graphs.step import CAPTURED
from scripts.benchmarks.engines import Engine, answers, figures, freed, patched, plain, random_model, stock, title
from scripts.benchmarks.harness import TINY, Case, Option, cases, common, table

PREFILL = [Case(1, length, 1) for length in (32, 128, 512, 2048)]
CASES = [*PREFILL, Case(1, 128), Case(8, 128), Case(32, 128), Case(1, 4096)]
SHORT = 16  # tokens of the short answer: past the first steps, which may find things cold
# peers in a loop of their own: bits of their weights
LOOPS = {"compiled": None, "tuned": None, "torchao-int8": 8, "torchao-int8-tuned": 8, "torchao-int4": 4,
         "torchao-int4-tuned": 4}  # fmt: skip
STOCK = {"eager": plain, "static": partial(plain, cache_implementation="static")}
PEER_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError)
OPTIONS = (
    *common(model="llama2-7b", device="cuda", recipes=["exact", "compact", "int8", "int4"], repeats=5),
    cases(CASES),
    Option("peers", list(STOCK), "Engines beside ours in the first case; a loop compiles for a minute or more.",
           [*STOCK, *LOOPS]),
    Option("case_peers", ["static"], "Engines beside ours in later cases of several sequences.", STOCK),
    Option("unverified", False, "Time each recipe a second time, patched with verify=False."),
    Option("plugin", None, "A Python file that adds implementations, as for `accelpatch run`."),
    Option("dtype", "bfloat16", "The type of the model's weights.", ["bfloat16", "float16"]), TINY,
)  # fmt: skip


def looping(base: nn.Module, name: str, room: int) -> Engine:
    """A peer of LOOPS, for sequences of up to `room` tokens. Raises ImportError where torchao is not there."""
    model: Any = base
    if LOOPS[name]:
        from torchao import quantization as ao  # its weight-only form of every linear layer, the head too

        model, own = copy.deepcopy(base), {"set_inductor_config": False}
        four = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d", **own}
        ao.quantize_(model, ao.Int8WeightOnlyConfig(**own) if LOOPS[name] == 8 else ao.Int4WeightOnlyConfig(**four))
    return Engine(f"{name} loop", model, Loop(model, room, name.endswith("tuned")), read_bytes(model))


class Loop:
    """Greedy decoding by a compiled step over a static cache; the prompt runs uncompiled.

    searched: whether the compiler tries variants of each kernel, and takes its own for products of one row.
    """

    def __init__(self, model: Any, room: int, searched: bool):
        from transformers import StaticCache

        self._model, self._cache = model, StaticCache(config=model.config, max_cache_len=room)
        options: dict[str, Any] = {"triton.cudagraphs": True, "coordinate_descent_tuning": searched}
        self._step = torch.compile(self._next, options=options)

    def _next(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(tokens, positions), positions + 1

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given = {"position_ids": positions, CACHE: self._cache, "use_cache": True, "logits_to_keep": 1}
        best: Tensor = self._model(tokens, **given).logits[:, -1:].argmax(-1)
        return best

    @torch.inference_mode()
    def __call__(self, ids: Tensor, new: int) -> Tensor:
        """ids[B, L] and `new` tokens after it."""
        self._cache.reset()
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        made = [ids, self._run(ids, positions)]
        tokens, places = made[-1].clone(), positions[:, -1:].clone() + 1
        for _ in range(new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            tokens, places = (one.clone() for one in self._step(tokens, places))
            made.append(tokens)
        return torch.cat(made, 1)


def read_bytes(model: nn.Module) -> int:
    """What a token reads of a model's weights: all but the rows of the embedding that it does not use."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    every = sum(held(p) for p in model.parameters())
    tied = model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    return every if tied else every - held(embedding)


def held(tensor: Any) -> int:
    """Bytes of a tensor, or of all the tensors that one of torchao's holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(held(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


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


def warm(engines: Sequence[Engine], ids: Tensor, new: int) -> dict[str, Engine]:
    """The engines that run, warmed up; a peer that fails is left out, with its error."""
    ready = {}
    for engine in engines:
        begun = time.perf_counter()
        try:
            for count in (new, SHORT, new):  # the longest first: a static cache keeps its size, and what was compiled
                engine.call(ids, count)
            synchronize(ids.device)
            ready[engine.name] = engine
            print(f"{engine.name}: warm after {time.perf_counter() - begun:.1f} s", flush=True)
        except PEER_ERRORS as error:  # must not cost the others their figures
            if engine.name.startswith("accelpatch"):
                raise
            print(f"{engine.name}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return ready


def prefill(case: Case, engines: Sequence[Engine], ids: Tensor, repeats: int) -> list[dict[str, Any]]:
    """generate() for one token."""
    for engine in engines:
        for _ in range(3):
            engine.call(ids, 1)
    taken = answers({one.name: one for one in engines}, ids, 1, 2 * repeats, 0)
    return table(figures(case, taken, ["HF eager"]), title(case, 2 * repeats, 3))


def decode(
    case: Case, engines: Sequence[Engine], ids: Tensor, repeats: int, limit: float, cached: int
) -> list[dict[str, Any]]:
    """The figures of one case. cached: bytes of keys and values of a token."""
    ready = warm(engines, ids, case.new)
    taken = answers(ready, ids, case.new, repeats, 0, SHORT)
    cache = case.batch * (case.prompt + (SHORT + case.new) / 2) * cached
    read = {name: one.bytes + cache for name, one in ready.items()}
    beside = [name for name in ready if not name.startswith("accelpatch")]
    rows = figures(case, taken, beside, short=SHORT, limit=limit, read=read)
    return table(rows, title(case, repeats, 3) + "; GB with the cache")


def loop_over_replays(engine: Engine, ids: Tensor, step_seconds: float, count: int = 64) -> float | None:
    """Wall time of a decode step over that of the replays of its two graphs alone."""
    steps: Mapping[Any, Any] = getattr(engine.model._accelpatch_runtime, "_steps", {})
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


def loops(names: Sequence[str], base: Any, case: Case) -> list[Engine]:
    """The peers with a loop of their own, as many as are here."""
    found = []
    for name in names:
        try:
            found.append(looping(base, name, case.prompt + case.new))
        except ImportError as error:
            print(f"{name}: left out: {error}", flush=True)
    return found


def ours(asked: argparse.Namespace, base: Any, ids: Tensor) -> tuple[list[Engine], dict[str, dict[str, Any]]]:
    """The patched engines, checked, and what is noted of each."""
    mine, notes = [], {}
    for verify in (True, False) if asked.unverified else (True,):
        for recipe in asked.recipes:
            name = f"accelpatch {recipe}" + ("" if verify else ", verify=False")
            mine.append(patched(base, recipe, name, ids, how=plain, verify=verify))
            notes[name] = mine[-1].seconds
            if verify:  # while there is room for its weights in float32
                notes[name]["logits error"] = check(mine[-1], ids)
    print(json.dumps(notes, indent=1), flush=True)
    freed()
    return mine, notes


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, time, print."""
    if asked.plugin:
        accelpatch.load_plugin(asked.plugin)
    limit = read_limit(torch.device(asked.device))
    print(f"read limit {limit.bytes_per_second / 1e12:.3f} TB/s ({limit.method})", flush=True)
    base = random_model(asked)
    first = next((case for case in asked.cases if case.new > 1), asked.cases[0])
    peers = {name: stock(base, f"HF {name}", read_bytes(base), how) for name, how in STOCK.items()}
    cached = cached_bytes(base)
    mine, notes = ours(asked, base, first.ids(base))
    theirs = [peers[name] for name in asked.peers if name in STOCK]
    eager = [one for one in theirs if one.name == "HF eager"]
    found: dict[str, Any] = {"notes": notes, "read_limit": asdict(limit)}
    for case in asked.cases:
        ids = case.ids(base)
        if case.new == 1:
            found[str(case)] = prefill(case, [*eager, *mine], ids, asked.repeats)
            continue
        beside = [peers[name] for name in asked.case_peers] if case.batch > 1 else eager
        if case is first:
            beside = [*theirs, *loops([name for name in asked.peers if name in LOOPS], base, case)]
        found[str(case)] = decode(case, [*beside, *mine], ids, asked.repeats, limit.bytes_per_second, cached)
        rows = {row["engine"]: row["ms a step"] for row in found[str(case)]}
        for engine in mine if case is first else ():
            notes[engine.name]["loop over replays"] = loop_over_replays(engine, ids, rows[engine.name] / 1e3)
    print(json.dumps(notes, indent=1))
    return found
