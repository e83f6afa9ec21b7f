"""Prompt lookup on one GPU, beside the same patched model without it, in one run and in turn.

    python scripts/bench.py lookup [--model llama2-7b] [--recipes exact int8 int4] [--new 128] [--repeats 5]

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
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import accelpatch
from accelpatch.bench.timing import once
from accelpatch.recipe.recipe import Runtime
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime
from accelpatch.runtime.generation.speculation import ACCEPTED, DRAFTS, STEPS, PromptLookup
from accelpatch.runtime.graphs.kv_cache import cache_of
from accelpatch.runtime.graphs.step import CAPTURED
from scripts.benchmarks.engines import Engine, answers, random_model
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

SHORT, OFF, ON = 16, "off", "prompt_lookup"  # tokens of the short answer; what generate() may do
TRIES = 20  # prompts that are tried for an answer that repeats nothing
REPLAYS = 30
CASES = ["copying", "new", "misleading"]
OPTIONS = (
    *common(model="llama2-7b", device="cuda", recipes=["exact", "int8", "int4"], repeats=5), cases(CASES),
    Option("new", 128, "Tokens of the long answer."), TINY,
)  # fmt: skip
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
        self.runtimes = {say: new_runtime(kind, Runtime(speculate=say)) for say in (OFF, ON)}

    def call(self, say: str, ids: Tensor, new: int, **options: Any) -> Any:
        """So many new tokens with prompt lookup `off`, or by `prompt_lookup`."""
        vars(self.model)[RUNTIME] = self.runtimes[say]
        torch.manual_seed(7)
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
        return self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**given, **options})

    def paths(self) -> Counter[str]:
        """What calls with prompt lookup did so far."""
        return Counter(self.runtimes[ON].paths)


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
            due = pair.call(OFF, ids, new, **options)
            with oracle(due.sequences):
                mine = pair.call(ON, ids, new, **options)
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


def prompts(pair: Pair, base: Any, new: int) -> dict[str, Tensor]:
    """The prompts of the three cases."""

    def answer(ids: Tensor, length: int) -> Tensor:
        made: Tensor = pair.call(OFF, ids, length).sequences[:, ids.shape[1] :]
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
    step = next(reversed(pair.runtimes[ON].captured._steps.values()))
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


def measured(base: Any, recipe: str, asked: argparse.Namespace, printed: Table) -> dict[str, float]:
    """All of one recipe: check, cases; milliseconds of its steps."""
    check(Pair(base, recipe), base, recipe)
    with forgetting(base):
        pair = Pair(base, recipe)
    given = {name: ids for name, ids in prompts(pair, base, asked.new).items() if name in asked.cases}
    engines = {
        (name, say): Engine(name, pair.model, lambda ids, new, say=say: pair.call(say, ids, new))
        for name in given for say in (OFF, ON)
    }  # fmt: skip
    ids = {(name, say): given[name] for name, say in engines}
    taken = answers(engines, ids, asked.new, asked.repeats, 1, SHORT)
    for name, prompt in given.items():
        before = pair.paths()
        pair.call(ON, prompt, asked.new)
        did = pair.paths() - before
        rates = {say: sorted(1 / one for one in taken[name, say].step) for say in (OFF, ON)}
        medians = {say: statistics.median(rate) for say, rate in rates.items()}
        row: dict[str, Any] = {"recipe": recipe, "case": name, "prompt": prompt.shape[1]}
        for say, label in ((OFF, "without"), (ON, "with")):
            row |= {f"{label}, tok/s": medians[say], f"of it, tok/s ({label})": (rates[say][0], rates[say][-1])}
        row |= {
            "times": medians[ON] / medians[OFF],
            "steps": did[CAPTURED],
            f"of them of {DRAFTS + 1} tokens": did[STEPS],
        }
        printed.add(row | {"drafts accepted": did[ACCEPTED]})
    return step_seconds(pair)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, time, print."""
    base, steps = random_model(asked), {}
    printed = Table(f"{asked.new} new tokens, median of {asked.repeats} after 1 to warm up")
    for recipe in asked.recipes:
        steps[recipe] = measured(base, recipe, asked, printed)
    print(f"\nms of a step of one token and of several, replays alone: {steps}")
    return {"rows": printed.rows, "ms_of_steps": steps}
