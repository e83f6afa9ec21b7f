"""Drafts that a model makes (`assistant_model=`), beside the same patched model without them, in one run and in turn.

    python scripts/bench.py drafts [--model llama2-7b] [--recipes exact int8 int4] [--drafts 5] [--new 128]
    python scripts/bench.py drafts --device cpu --dtype float32 --model smollm2-135m --recipes int8

The model has the named shape and random weights; all its layers but the first two add nothing to the residual stream
(and are read as ever), so that an assistant of those two layers is always right. `right` of its draft tokens are left
as they are, the others are changed at random, seeded: 1 always right, 0.7, 0 never right. Assistant and model are
patched with the same recipe. The first rows are the unpatched model's, alone and with the unpatched assistant, by
transformers' own loop. Before anything is timed, the tokens of each case are held to those without drafts.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import accelpatch
from accelpatch.report import DRAFT_CHECKS as CHECKS
from accelpatch.report import DRAFTED
from accelpatch.report import DRAFTS_ACCEPTED as ACCEPTED
from accelpatch.runtime.generation.draft_model_run import DraftRun
from accelpatch.runtime.generation.native_drafts import NativeDrafter
from scripts.benchmarks.engines import STOCK, Engine, answers, freed, plain, random_model
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

LAYERS = 2  # of the assistant
SHORT = 16  # tokens of the short answer, which is taken off the long one
CASES = ["1", "0.7", "0"]
OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5),
    cases(CASES, "Shares of the draft tokens that are right."),
    Option("drafts", 5, "The most draft tokens of a round."),
    Option("prompt", 128, "Tokens of the prompt."), Option("new", 128, "Tokens of the long answer."),
    Option("stock", True, "Time the unpatched model too."), TINY,
)  # fmt: skip


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
    if right == 1.0:
        yield
        return
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


def call(model: Any, assistant: Any = None, right: float = 1.0) -> Callable[[Tensor, int], Tensor]:
    """ids, new -> the answer, with drafts of which a share is right."""
    if assistant is None:
        return lambda ids, new: plain(model, ids, new)

    def made(ids: Tensor, new: int) -> Tensor:
        with spoiled(right, model.config.vocab_size):
            return plain(model, ids, new, assistant_model=assistant)

    return made


def counted(model: Any) -> Counter[str]:
    """What became of drafts so far."""
    paths = model.accelpatch.report().paths
    return Counter({name: paths.get(name, 0) for name in (CHECKS, DRAFTED, ACCEPTED)})


def engines_of(name: str, model: Any, assistant: Any, rights: list[str]) -> dict[tuple[str, str], Engine]:
    """Without drafts, and with those of an assistant, a copy for each share: what is learnt of one is its own."""
    without = (name, "without")
    found = {without: Engine(name, model, call(model))}
    for right in rights:
        found[name, f"{right} right"] = Engine(name, model, call(model, copy.deepcopy(assistant), float(right)))
    return found


def measured(
    engines: dict[tuple[str, str], Engine], ids: Tensor, asked: argparse.Namespace, printed: Table, held: bool
) -> None:
    """Rows of one model. held: whether its tokens must be those without drafts."""
    due, made = next(iter(engines.values())).call(ids, asked.new), {}
    for key, engine in engines.items():
        before = counted(engine.model) if held else Counter()
        if held and not torch.equal(engine.call(ids, asked.new), due):  # type: ignore[arg-type]
            raise SystemExit(f"{key}: other tokens than without drafts: nothing is timed over red")
        made[key] = counted(engine.model) - before if held else Counter()
    taken = answers(engines, ids, asked.new, asked.repeats, 1, SHORT)
    medians = {key: statistics.median(1 / step for step in one.step) for key, one in taken.items()}
    first = next(iter(medians.values()))
    for key, one in taken.items():
        rates = sorted(1 / step for step in one.step)
        before = counted(engines[key].model) if held else Counter()
        engines[key].call(ids, asked.new)
        made[key] = counted(engines[key].model) - before if held else Counter()
        printed.add({
            "model": key[0], "drafts": key[1], "tok/s": medians[key],
            "slowest to fastest, tok/s": (rates[0], rates[-1]),
            "times without": medians[key] / first, "checks": made[key][CHECKS] or None,
            "drafted": made[key][DRAFTED] or None, "accepted": made[key][ACCEPTED] or None,
        })  # fmt: skip


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, time, print."""
    base, assistant = pair(asked)
    ids = torch.randint(2, base.config.vocab_size, (1, asked.prompt), generator=torch.Generator().manual_seed(0))
    ids = ids.to(base.device)
    printed = Table(
        f"{asked.new} new tokens, up to {asked.drafts} drafts, median of {asked.repeats} after 1 to warm up"
    )
    if asked.stock:
        measured(engines_of(STOCK, base, assistant, ["1"]), ids, asked, printed, held=False)
    for recipe in asked.recipes:
        model, draft = copy.deepcopy(base), copy.deepcopy(assistant)
        accelpatch.patch(model, recipe, keep_original="none")
        accelpatch.patch(draft, recipe, keep_original="none")
        measured(engines_of(recipe, model, draft, asked.cases), ids, asked, printed, held=True)
        del model, draft
        freed()
    return {"rows": printed.rows}
