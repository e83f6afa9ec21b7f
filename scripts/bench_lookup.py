"""Prompt lookup on one GPU, beside the same patched model without it, in one run and in turn.

    python scripts/bench_lookup.py [--model llama2-7b] [--recipes exact int8 int4] [--new 128] [--repeats 5]
                                   [--json FILE]

The model has the named shape and random bf16 weights. Before anything is timed, tokens, scores, logits and cached keys
and values of several prompts and ways of choosing are held to those without prompt lookup, bit for bit; drafts are the
answer's tokens up to a random place then, and wrong from there on.

For the timing the weights of the attentions' outputs are zero (and read as ever): the next token then hangs on the last
one alone, and an answer of the model goes on alike where a prompt holds it. The cases: `copying`, a prompt of 192
tokens and its beginning once more, whose continuation is the prompt; `new`, a prompt whose answer repeats nothing, so
that nothing is drafted; `misleading`, the same answer after a prompt in which each of its pairs is followed by another
token.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.timing import once
from accelpatch.models import load
from accelpatch.recipe.recipe import Runtime
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime
from accelpatch.runtime.generation.speculation import ACCEPTED, DRAFTS, STEPS, PromptLookup
from accelpatch.runtime.graphs.kv_cache import cache_of
from accelpatch.runtime.graphs.step import CAPTURED

SHORT = 16  # tokens of the short answer
TRIES = 20  # prompts that are tried for an answer that repeats nothing
REPLAYS = 30
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logits": {"output_logits": True, "output_scores": True},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.001, "output_logits": True},
}


class Pair:
    """A patched model, and the switch between its runtimes with and without prompt lookup."""

    def __init__(self, base: Any, recipe: str):
        self.model: Any = copy.deepcopy(base)
        accelpatch.patch(self.model, recipe, keep_original="none")
        kind = next(self.model.parameters()).device.type
        self.runtimes = {say: new_runtime(kind, Runtime(speculate=say)) for say in ("off", "prompt_lookup")}

    def call(self, say: str, ids: Tensor, new: int, **options: Any) -> Any:
        """So many new tokens with prompt lookup `off`, or by `prompt_lookup`."""
        vars(self.model)[RUNTIME] = self.runtimes[say]
        torch.manual_seed(7)
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
        return self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**given, **options})

    def paths(self) -> Counter[str]:
        """What calls with prompt lookup did so far."""
        return Counter(self.runtimes["prompt_lookup"].paths)


@dataclass
class Case:
    """Seconds of a step's worth, by turn: of a token without prompt lookup and with it."""

    name: str
    ids: Tensor
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"off": [], "prompt_lookup": []})

    def time(self, pair: Pair, new: int) -> None:
        """One turn of each, by the difference of a long and a short answer."""
        device = self.ids.device
        for say, seconds in self.seconds.items():
            short, long = (once(lambda n=n, s=say: pair.call(s, self.ids, n), device) for n in (SHORT, new))
            seconds.append((long - short) / (new - SHORT))

    def figures(self, pair: Pair, recipe: str, new: int) -> dict[str, Any]:
        """Tokens a second of both (median, slowest, fastest), their ratio, and what a call did."""
        before = pair.paths()
        pair.call("prompt_lookup", self.ids, new)
        did = pair.paths() - before
        rates = {say: sorted(1 / one for one in seconds) for say, seconds in self.seconds.items()}
        medians = {say: statistics.median(rate) for say, rate in rates.items()}
        return {
            "recipe": recipe, "case": self.name, "prompt": self.ids.shape[1], "rates": rates, "medians": medians,
            "times": medians["prompt_lookup"] / medians["off"], "steps": did[CAPTURED], "of_several": did[STEPS],
            "right": did[ACCEPTED],
        }  # fmt: skip


def same(mine: Any, due: Any) -> bool:
    """Whether two results of generate() are the same bits."""
    pairs = [(mine.sequences, due.sequences)]
    for name in ("logits", "scores"):
        pairs += zip(mine.get(name, ()), due.get(name, ()), strict=True)
    for one, other in zip(cache_of(mine).layers, cache_of(due).layers, strict=True):
        pairs += [(one.keys, other.keys), (one.values, other.values)]
    return all(torch.equal(one, other) for one, other in pairs)


def oracle(answer: Tensor) -> Any:
    """In it drafts are tokens of `answer`[1, L], wrong from a random place on; now and then there are none."""
    known, draw = answer[0].tolist(), random.Random(3)

    def draft(lookup: PromptLookup) -> list[int] | None:
        found = (known[len(lookup) :] + [2] * DRAFTS)[:DRAFTS]
        right = draw.randrange(-1, DRAFTS + 1)
        return None if right < 0 else [*found[:right], *(token ^ 1 for token in found[right:])]

    return mock.patch.object(PromptLookup, "draft", draft)


def check(pair: Pair, base: Any, recipe: str, new: int = 32) -> None:
    """Ends the program where a bit differs from the same run without prompt lookup, or where nothing was drafted."""
    prompts = {str(length): drawn(base, length, length) for length in (1, 250, 600)}
    for way, options in WAYS.items():
        before = pair.paths()
        for name, ids in prompts.items():
            due = pair.call("off", ids, new, **options)
            with oracle(due.sequences):
                mine = pair.call("prompt_lookup", ids, new, **options)
            if not same(mine, due):
                raise SystemExit(f"{recipe}, {way}, prompt {name}: other bits than without: nothing is timed over red")
        did = pair.paths() - before
        print(f"{recipe}, {way}: the same bits on {len(prompts)} prompts; {dict(did)}", flush=True)
        if not did[ACCEPTED] or did[CAPTURED] + did[ACCEPTED] != (new - 1) * len(prompts):
            raise SystemExit(f"{recipe}, {way}: {dict(did)}: too little was drafted for a check")


def drawn(base: Any, length: int, seed: int) -> Tensor:
    """Random tokens [1, length] on the model's device."""
    made = torch.randint(2, base.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
    return made.to(base.device)


def cases(pair: Pair, base: Any, new: int) -> dict[str, Tensor]:
    """The prompts of the three cases."""

    def answer(ids: Tensor, length: int) -> Tensor:
        made: Tensor = pair.call("off", ids, length).sequences[:, ids.shape[1] :]
        return made

    known = answer(drawn(base, 64, 0), 192)
    for seed in range(1, TRIES):
        ids = drawn(base, 64, seed)
        made = answer(ids, new)
        if made.unique().numel() == new:
            break
    else:
        raise SystemExit(f"each of {TRIES} answers repeats a token: ask for fewer new tokens")
    before = torch.cat([ids[:, -1:], made[:, :-1]], dim=1)
    false = torch.stack([before, made, drawn(base, new, 1000)], dim=2).flatten(1)
    return {
        "copying": torch.cat([known, known[:, :8]], dim=1), "new": ids, "misleading": torch.cat([false, ids], dim=1),
    }  # fmt: skip


def step_seconds(pair: Pair) -> dict[str, float]:
    """Milliseconds of a step of one token and of one of several, replayed over the same cache."""
    step = next(reversed(pair.runtimes["prompt_lookup"].captured._steps.values()))
    found = {}
    for name, replay in (("one", step.replay), ("several", step.verification.replay)):

        def replays(replay: Any = replay) -> None:
            for _ in range(REPLAYS):
                replay()

        for _ in range(2):  # the first time untimed
            step.batch.slot.fill_(128)
            step.batch.positions.fill_(128)
            found[name] = once(replays, step.batch.device) / REPLAYS * 1000
    return found


@contextmanager
def forgetting(base: Any) -> Iterator[None]:
    """In it the outputs of the attentions are zero."""
    weights = [layer.self_attn.o_proj.weight for layer in base.model.layers]
    kept = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
        yield
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)


def measured(base: Any, recipe: str, new: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All of one recipe: check, cases, steps."""
    begun = time.perf_counter()
    check(Pair(base, recipe), base, recipe)
    with forgetting(base):
        pair = Pair(base, recipe)
    given = cases(pair, base, new)
    print(f"{recipe}: checked and made ready in {time.perf_counter() - begun:.1f} s", flush=True)
    timed = [Case(name, ids) for name, ids in given.items()]
    for case in timed:
        case.time(pair, new)
        case.seconds = {say: [] for say in case.seconds}
    for _ in range(repeats):
        for case in timed:
            case.time(pair, new)
    rows = [case.figures(pair, recipe, new) for case in timed]
    steps = step_seconds(pair)
    print(f"{recipe}: {time.perf_counter() - begun:.1f} s in all; ms of a step of one token and of several: {steps}")
    return rows, steps


def table(rows: list[dict[str, Any]]) -> None:
    """The figures as text."""
    print("\n| recipe | case | prompt | tok/s without | with | times | steps | of them of 8 tokens | drafts right |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        shown = [
            f"{row['medians'][say]:.1f} ({row['rates'][say][0]:.1f} to {row['rates'][say][-1]:.1f})"
            for say in ("off", "prompt_lookup")
        ]
        print(f"| {row['recipe']} | {row['case']} | {row['prompt']} | {shown[0]} | {shown[1]} | {row['times']:.2f} | "
              f"{row['steps']} | {row['of_several']} | {row['right']} |")  # fmt: skip


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="The model whose shape is used (default: %(default)s).")
    parser.add_argument("--device", default="cuda", help="The device to run on (default: %(default)s).")
    parser.add_argument("--recipes", nargs="*", default=["exact", "int8", "int4"],
                        help="The recipes to patch with (default: %(default)s).")  # fmt: skip
    parser.add_argument("--new", type=int, default=128, help="Tokens of the long answer (default: %(default)s).")
    parser.add_argument("--repeats", type=int, default=5, help="Timed turns of each case (default: %(default)s).")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures to this file.")
    asked = parser.parse_args()
    base: Any = load.random(asked.model, dtype=torch.bfloat16, device=torch.device(asked.device))
    base.generation_config.eos_token_id = None
    every, steps = [], {}
    for recipe in asked.recipes:
        rows, steps[recipe] = measured(base, recipe, asked.new, asked.repeats)
        every += rows
        table(rows)
    if len(asked.recipes) > 1:
        table(every)
    if asked.json:
        asked.json.write_text(json.dumps({"rows": every, "ms_of_steps": steps}, indent=1))


if __name__ == "__main__":
    main()
