"""Stock generate() on one GPU before and after a patch, beside its peers, all in one run and in turn.

The model has random 16-bit weights and is patched with the defaults, verified. A case of one new token is the prefill,
of HF eager and ours. All peers run the first other case, `--case-peers` the further ones of several sequences. The
decode rate is that of the difference of a long answer and one of 16 tokens. Its limit is the bytes of weights, scales
and head, and of keys and values at the mean context, over the read limit of the run. Before anything is timed, the
tokens of captured steps are held to the patched modules' own logits without a cache.

The peers' loop is gpt-fast's: one token's step over a static cache, compiled by torch and captured, and no look at the
tokens between steps. "compiled" has the settings of `torch.compile(mode="reduce-overhead")`; "tuned" searches for the
best form of each kernel on top, as gpt-fast and torchao ask for. torchao quantises the weights of four of them; without
it they are left out. Each engine states its settings itself: those that torchao sets would hold for all of them.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.bench.generate import cached_bytes
from accelpatch.bench.read_limit import read_limit
from accelpatch.fusion.cache_name import CACHE
from scripts.benchmarks.engines import Engine, among_the_best, freed, patched, plain, random_model, turns
from scripts.benchmarks.harness import TINY, Case, Option, cases, common
from scripts.benchmarks.rates import Rates

CASES = [*(Case(1, length, 1) for length in (32, 128, 512, 2048)), Case(1, 128), Case(8, 128), Case(32, 128),
         Case(1, 4096)]  # fmt: skip
SHORT = 16  # tokens of the short answer: past the first steps, which may find things cold
#: peers in a loop of their own: bits of their weights
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
    Option("dtype", "bfloat16", "The type of the model's weights.", ["bfloat16", "float16", "float32"]), TINY,
)  # fmt: skip


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


def peer(name: str, base: Any, case: Case) -> Engine | None:
    """An engine of STOCK or LOOPS that has run a case once, the longest answer first; None where it fails."""
    model: Any = base
    try:
        if bits := LOOPS.get(name):
            from torchao import quantization as ao  # its weight-only form of every linear layer, the head too

            model, own = copy.deepcopy(base), {"set_inductor_config": False}
            four = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d", **own}
            ao.quantize_(model, ao.Int8WeightOnlyConfig(**own) if bits == 8 else ao.Int4WeightOnlyConfig(**four))
        loop = name in LOOPS
        call = Loop(model, case.prompt + case.new, name.endswith("tuned")) if loop else partial(STOCK[name], model)
        call(case.ids(model), case.new)
    except PEER_ERRORS as error:  # must not cost the others their figures
        print(f"{name}: left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    return Engine(f"{name} loop" if loop else f"HF {name}", model, call, read_bytes(model), cached=cached_bytes(base))


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


def ours(asked: argparse.Namespace, base: Any, ids: Tensor) -> list[Engine]:
    """The patched engines, checked."""
    mine, cached = [], cached_bytes(base)
    for verify in (True, False) if asked.unverified else (True,):
        for recipe in asked.recipes:
            name = f"accelpatch {recipe}" + ("" if verify else ", verify=False")
            mine.append(patched(base, recipe, name, ids, how=plain, verify=verify))
            mine[-1].cached = cached
            print(f"{name}: {mine[-1].seconds}", flush=True)
            if not among_the_best(mine[-1], ids):
                raise SystemExit(f"{name}: other tokens: nothing is timed over red")
    freed()
    return mine


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, time, print."""
    if asked.plugin:
        accelpatch.load_plugin(asked.plugin)
    limit = read_limit(torch.device(asked.device))
    print(f"read limit {limit.bytes_per_second / 1e12:.3f} TB/s ({limit.method})", flush=True)
    base = random_model(asked)
    first = next((case for case in asked.cases if case.new > 1), asked.cases[0])
    mine = ours(asked, base, first.ids(base))
    printed: dict[bool, Rates] = {}
    for prefill in (True, False):
        beside = ["HF eager"] if prefill else ["HF eager", "HF static", *(f"{name} loop" for name in LOOPS)]
        about, short = turns(asked.repeats * (1 + prefill), 3), 1 if prefill else SHORT
        printed[prefill] = Rates(about, beside, short=short, limit=limit.bytes_per_second)
        for case in (case for case in asked.cases if (case.new == 1) == prefill):
            names = ["eager"] if case.batch == 1 or prefill else asked.case_peers
            names = (
                asked.peers if case is first and not prefill else [n for n in names if n != "eager" or n in asked.peers]
            )
            engines = [*filter(None, (peer(name, base, case) for name in names)), *mine]
            printed[prefill].in_turn(engines, [case], asked.repeats * (1 + prefill), 3)
    return {"read_limit": vars(limit), "prefill": printed[True].rows, "decode": printed[False].rows}
