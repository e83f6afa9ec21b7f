"""The table of models that generate: first tokens, decode rates, shares of the read limit, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from accelpatch.bench.generate import cached_bytes
from scripts.benchmarks.engines import Engine, Taken, allocated, answers, freed
from scripts.benchmarks.harness import Case, Table


class Rates(Table):
    """The table of engines that generate: a row an engine and case, with the columns that docs/benchmarks.md quotes.

    beside: engines that the later rows of a case are compared with. short: tokens of the short answers. limit: bytes a
    second that memory reads, with which a row says what part of it a step takes, by the engine's bytes and its cache's
    (where the cache does not count, of one sequence only: experts of several add up). Rates are those of all sequences
    together.
    """

    def __init__(self, title: str, beside: Sequence[str] = (), *, short: int = 1, limit: float = 0.0):
        super().__init__(title)
        self._beside, self._short, self._limit = beside, short, limit
        self._known: dict[tuple[Case, str], tuple[float, float]] = {}

    def row(self, case: Case, engine: Engine, taken: Taken) -> dict[str, Any]:
        """Medians, slowest and fastest, and how many times as fast as each of `beside`."""
        first, rates = statistics.median(taken.first), sorted(case.batch / max(step, 1e-9) for step in taken.step)
        rate, times = statistics.median(rates), [1e3 * one for one in taken.first]
        bases = {name: self._known[case, name] for name in self._beside if (case, name) in self._known}
        self._known[case, engine.name] = first, rate
        bases |= {name: (first, rate) for name in self._beside if name == engine.name}
        row: dict[str, Any] = {"case": str(case), "engine": engine.name}
        if self._short == 1:
            row |= {"first token, ms": 1e3 * first, "fastest to slowest, ms": (min(times), max(times))}
            row |= {f"first token, times {name}": base / first for name, (base, _) in bases.items()}
        if case.new > self._short:
            row |= {"tok/s": rate, "slowest to fastest, tok/s": (rates[0], rates[-1])}
            row |= {f"times {name}": rate / base for name, (_, base) in bases.items()}
            row["ms a step"] = 1e3 * case.batch / rate
            if self._limit and engine.bytes and (case.batch == 1 or engine.cached):
                read = engine.bytes + case.batch * (case.prompt + (self._short + case.new) / 2) * engine.cached
                row |= {"GB a step": read / 1e9, "share of its limit": rate / case.batch * read / self._limit}
        return row | taken.memory

    def in_turn(self, engines: Sequence[Engine], cases: Sequence[Case], repeats: int, warmup: int) -> None:
        """Engines that are all in memory: in a case each runs once in every turn."""
        for case in cases:
            ids = case.ids(engines[0].model)
            taken = answers({one.name: one for one in engines}, ids, case.new, repeats, warmup, self._short)
            self.add(*(self.row(case, one, taken[one.name]) for one in engines))

    def alone(self, makers: Sequence[Callable[[], Engine]], cases: Sequence[Case], repeats: int, warmup: int) -> None:
        """Engines that are not in memory together: each is made, runs every case, and goes. Its memory is noted."""
        for make in makers:
            freed()
            engine = make()
            weights = allocated(engine.device)
            taken = {case: _measured(engine, case, repeats, warmup, self._short, weights) for case in cases}
            self.add(*(self.row(case, engine, one) for case, one in taken.items()))
            handle = getattr(engine.model, "accelpatch", None)
            if handle is not None:
                print(f"  {engine.name}: {dict(handle.report().paths)}", flush=True)
            del engine, handle


def _measured(engine: Engine, case: Case, repeats: int, warmup: int, short: int, weights: float | None) -> Taken:
    """What an engine that is alone took, and the memory at the peak of its calls but the first; weights: their GB."""
    ids = case.ids(engine.model)
    engine.call(ids, 1)
    if weights is not None:
        torch.cuda.reset_peak_memory_stats(engine.device)
    found = answers({"": engine}, ids, case.new, repeats, warmup, short)[""]
    if weights is None:
        return found
    peak, cache = allocated(engine.device, peak=True) or 0.0, case.batch * case.prompt * cached_bytes(engine.model)
    memory = {"weights, GB": weights, "peak, GB": peak, "beyond weights and cache, GB": peak - weights - cache / 1e9}
    return replace(found, memory=memory)
