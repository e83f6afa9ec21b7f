"""Topics of drafts: prompt lookup, and those of an assistant model, beside the same patched model without them."""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import accelpatch
from accelpatch.recipe.recipe import Runtime
from accelpatch.report import DRAFT_CHECKS, DRAFTED, DRAFTS_ACCEPTED
from accelpatch.runtime.generation.draft_model_run import DraftRun
from accelpatch.runtime.generation.native_drafts import NativeDrafter
from accelpatch.runtime.generation.patched_model import RUNTIME, new_runtime
from accelpatch.runtime.generation.speculation import ACCEPTED, DRAFTS, STEPS
from accelpatch.runtime.graphs.step import CAPTURED
from scripts.benchmarks.engines import STOCK, Engine, answers, freed, plain, random_model, turns
from scripts.benchmarks.harness import TINY, Case, Option, Topic, cases, common
from scripts.benchmarks.rates import Rates

SHORT = 16  # tokens of the short answer, which is taken off the long one
WITHOUT = "without"
TRIES = 20  # prompts that are tried for an answer that repeats nothing
LAYERS = 2  # of the assistant
Found = dict[str, Any]


def compared(
    printed: Rates, label: Found, engines: Mapping[str, Engine], ids: Tensor, asked: argparse.Namespace,
    counts: Mapping[str, str], held: bool = True,
) -> None:  # fmt: skip
    """Rows of the engines of one model and prompt, the first without drafts, whose tokens the others must give.

    counts: column -> what it counts of one call, as the model's report names it. held: whether tokens are compared.
    """
    due: Any = next(iter(engines.values())).call(ids, asked.new)
    for name, engine in engines.items():
        if held and not torch.equal(engine.call(ids, asked.new), due):  # type: ignore[arg-type]
            raise SystemExit(f"{label}, {name}: other tokens than without drafts: nothing is timed over red")
    taken = answers(engines, ids, asked.new, asked.repeats, 1, SHORT)
    for name, engine in engines.items():
        before = paths_of(engine.model)
        engine.call(ids, asked.new)
        did = paths_of(engine.model) - before
        row = printed.row(Case(1, ids.shape[1], asked.new), engine, taken[name])
        printed.add(label | row | {column: did[what] or None for column, what in counts.items()})


def paths_of(model: Any) -> Counter[str]:
    """How often a patched model did what so far."""
    return Counter(getattr(vars(model).get(RUNTIME), "paths", {}))


def drawn(base: Any, length: int, seed: int) -> Tensor:
    """Random tokens [1, length] on the model's device."""
    made = torch.randint(2, base.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
    return made.to(base.device)


def prompts(model: Any, new: int) -> dict[str, Tensor]:
    """The prompts of the three cases of prompt lookup, from answers of the model without it."""
    known = plain(model, drawn(model, 64, 0), 192)[:, 64:]
    for seed in range(1, TRIES):
        ids = drawn(model, 64, seed)
        made = plain(model, ids, new)[:, 64:]
        if made.unique().numel() == new:
            break
    else:
        raise SystemExit(f"each of {TRIES} answers repeats a token: ask for fewer new tokens")
    before = torch.cat([ids[:, -1:], made[:, :-1]], dim=1)
    false = torch.stack([before, made, drawn(model, new, 1000)], dim=2).flatten(1)
    return {
        "copying": torch.cat([known, known[:, :8]], dim=1), "new": ids, "misleading": torch.cat([false, ids], dim=1),
    }  # fmt: skip


def lookup(asked: argparse.Namespace) -> Found:
    """Rows without and with prompt lookup, of each recipe and case."""
    base = random_model(asked)
    asked.new = min(asked.new, 12) if asked.tiny else asked.new  # a small model's longer answers repeat themselves
    with torch.no_grad():
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    counts = {"steps": CAPTURED, f"of them of {DRAFTS + 1} tokens": STEPS, "drafts accepted": ACCEPTED}
    printed = Rates(f"{asked.new} new tokens, {turns(asked.repeats, 1)}", [WITHOUT], short=SHORT)
    for recipe in asked.recipes:
        model = copy.deepcopy(base)
        accelpatch.patch(model, recipe, keep_original="none")
        code = vars(model)[RUNTIME].code
        runtimes = {say: new_runtime(base.device.type, Runtime(speculate=say)) for say in ("off", "prompt_lookup")}

        def call(say: str, ids: Tensor, new: int, model: Any = model, runtimes: Found = runtimes) -> Tensor:
            vars(model)[RUNTIME] = runtimes[say]
            return plain(model, ids, new)

        for runtime in runtimes.values():
            runtime.code = code
        vars(model)[RUNTIME] = runtimes["off"]
        given = prompts(model, asked.new)
        engines = {WITHOUT: Engine(WITHOUT, model, partial(call, "off")),
                   "prompt lookup": Engine("prompt lookup", model, partial(call, "prompt_lookup"))}  # fmt: skip
        for name in asked.cases:
            compared(printed, {"recipe": recipe, "prompt": name}, engines, given[name], asked, counts)
        del model, engines, runtimes, call
        freed()
    return {"rows": printed.rows}


def pair(asked: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and the assistant that is always right."""
    base = random_model(asked)
    with torch.no_grad():
        for layer in base.model.layers[LAYERS:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    layers, base.model.layers = base.model.layers, base.model.layers[:LAYERS]
    assistant = copy.deepcopy(base)
    base.model.layers = layers
    assistant.config.num_hidden_layers = LAYERS
    assistant.generation_config.num_assistant_tokens = asked.drafts
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return base, assistant


@contextmanager
def spoiled(right: float, vocabulary: int) -> Iterator[None]:
    """In it only so many of the draft tokens are as the assistant made them."""
    generators: dict[torch.device, torch.Generator] = {}
    propose, proposed = DraftRun.propose, NativeDrafter.proposed

    def changed(tokens: Tensor) -> Tensor:
        draw = generators.setdefault(tokens.device, torch.Generator(tokens.device).manual_seed(1))
        wrong = torch.rand(tokens.shape, generator=draw, device=tokens.device) >= right
        return torch.where(wrong, (tokens + 1) % vocabulary, tokens)

    def on_device(drafter: Any, most: int) -> int:
        made = propose(drafter, most)
        tokens = drafter.drafts.drafts.drafted
        tokens.copy_(changed(tokens))
        return made

    def on_host(drafter: Any, most: int) -> list[int]:
        found: list[int] = changed(torch.tensor(proposed(drafter, most), dtype=torch.int64)).tolist()
        return found

    with mock.patch.object(DraftRun, "propose", on_device), mock.patch.object(NativeDrafter, "proposed", on_host):
        yield


def assisted(model: Any, assistant: Any, right: float) -> Callable[[Tensor, int], Tensor]:
    """ids, new -> the answer, with drafts of which a share is right."""
    if right == 1.0:
        return partial(plain, model, assistant_model=assistant)

    def made(ids: Tensor, new: int) -> Tensor:
        with spoiled(right, model.config.vocab_size):
            return plain(model, ids, new, assistant_model=assistant)

    return made


def drafts(asked: argparse.Namespace) -> Found:
    """Rows of the unpatched model, by transformers' own loop, and of each recipe."""
    base, assistant = pair(asked)
    ids = drawn(base, asked.prompt, 0)
    about = f"{asked.new} new tokens, up to {asked.drafts} drafts, {turns(asked.repeats, 1)}"
    printed = Rates(about, [WITHOUT], short=SHORT)
    counts = {"checks": DRAFT_CHECKS, "drafted": DRAFTED, "accepted": DRAFTS_ACCEPTED}
    for name in ([STOCK] if asked.stock else []) + asked.recipes:
        model, draft = (base, assistant) if name == STOCK else (copy.deepcopy(base), copy.deepcopy(assistant))
        for one in (model, draft) if name != STOCK else ():
            accelpatch.patch(one, name, keep_original="none")
        engines = {WITHOUT: Engine(WITHOUT, model, partial(plain, model))}
        for right in asked.cases if name != STOCK else ["1"]:  # a copy for each: what is learnt of one is its own
            call = assisted(model, copy.deepcopy(draft), float(right))
            engines[f"{right} right"] = Engine(f"{right} right", model, call)
        compared(printed, {"model": name}, engines, ids, asked, counts, held=name != STOCK)
        del model, draft, engines, call
        freed()
    return {"rows": printed.rows}


NEW = Option("new", 128, "Tokens of the long answer.")
TOPICS = {
    "lookup": Topic(
        "Prompt lookup on one GPU, beside the same patched model without it, in one run and in turn.\n\n"
        "Random weights. Those of the attentions' outputs are zero (and read as ever): the next token then hangs on\n"
        "the last one alone, and an answer of the model goes on alike where a prompt holds it. `copying`: a prompt of\n"
        "192 tokens and its beginning once more, whose continuation is the prompt; `new`: a prompt whose answer\n"
        "repeats nothing, so that nothing is drafted; `misleading`: the same answer after a prompt in which each of\n"
        "its pairs is followed by another token. Before a case is timed, its tokens are held to those without.",
        (*common(model="llama2-7b", device="cuda", recipes=["exact", "int8", "int4"], repeats=5),
         cases(["copying", "new", "misleading"]), NEW, TINY),
        lookup,
    ),
    "drafts": Topic(
        "Drafts that a model makes (`assistant_model=`), beside the same patched model without them, in turn.\n\n"
        "The model has random weights; all its layers but the first two add nothing to the residual stream (and are\n"
        "read as ever), so that an assistant of those two layers is always right. `right` of its draft tokens are\n"
        "left as they are, the others are changed at random, seeded. Both are patched with the same recipe.\n"
        "The first rows are the unpatched model's, alone and with the unpatched assistant, by transformers' own loop.\n"
        "Before anything is timed, the tokens of each case are held to those without drafts.",
        (*common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5),
         cases(["1", "0.7", "0"], "Shares of the draft tokens that are right."),
         Option("drafts", 5, "The most draft tokens of a round."), Option("prompt", 128, "Tokens of the prompt."),
         NEW, Option("stock", True, "Time the unpatched model too."), TINY),
        drafts,
    ),
}  # fmt: skip
