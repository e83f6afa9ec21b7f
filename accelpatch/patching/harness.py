"""Scores of a model in tasks of lm-evaluation-harness (the package lm_eval), before and after a patch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from accelpatch.errors import ArgumentError

MISSING = "scores of tasks are lm-evaluation-harness's: pip install lm-eval"
STDERR = "_stderr"


@dataclass(frozen=True)
class Score:
    """One metric of one task before and after the patch. error: the standard error of `before`, if it is known."""

    task: str
    metric: str
    before: float
    after: float
    error: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def task_manager(tasks: Sequence[str]) -> Any:
    """The harness's TaskManager. Raises ArgumentError if the package is missing, or has no task of a name."""
    try:
        known = importlib.import_module("lm_eval.tasks").TaskManager()
    except ImportError as error:
        raise ArgumentError(f"{MISSING} ({error})") from None
    if unknown := [task for task in tasks if task not in known.all_tasks]:
        raise ArgumentError(f"lm-evaluation-harness has no task {unknown[0]!r}: `lm-eval ls tasks` lists them")
    return known


def compare(
    model: nn.Module, tokenizer: Any, tasks: Sequence[str], limit: int | None,
    patched: Callable[[], AbstractContextManager[nn.Module]],
) -> list[Score]:  # fmt: skip
    """Scores of a model as it is, then within the context that `patched` makes. limit: the most samples of a task.

    Raises as `task_manager`.
    """
    known = task_manager(tasks)
    evaluator, models = (importlib.import_module(name) for name in ("lm_eval.evaluator", "lm_eval.models.huggingface"))
    wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer)

    def scores() -> Mapping[str, Mapping[str, Any]]:
        found = evaluator.simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, task_manager=known)
        results: Mapping[str, Mapping[str, Any]] = found["results"]
        return results

    before = scores()
    with patched():
        after = scores()
    return [one for task, scored in before.items() for one in _scores(task, scored, after[task])]


def _scores(task: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Score]:
    """The harness's keys are metric and filter, such as "acc,none"; the standard error's is "acc_stderr,none"."""
    found = []
    for name, value in before.items():
        metric, _, kind = name.partition(",")
        if isinstance(value, int | float) and kind and not metric.endswith(STDERR):
            error = before.get(f"{metric}{STDERR},{kind}")
            words = metric if kind == "none" else f"{metric} ({kind})"
            found.append(Score(task, words, value, after[name], error if isinstance(error, float) else None))
    return found
