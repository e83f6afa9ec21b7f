"""What a call of a patched model pays for checks: the look at code, and the check of the model before each step.

    python scripts/bench.py checks [--layers 32] [--repeats 11]

The look (runtime/code_watch.py) is once a call of the model or of generate(); the other (runtime/watch.py) is before
each step. A Llama of small layers on the CPU, in recipe `exact`: only the number of modules matters. Fastest of
`--repeats` rounds of 1,000 looks and of 300 checks.
"""

from __future__ import annotations

import argparse
import timeit
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.watch import Watch
from scripts.benchmarks.harness import Option, table

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
CASES = {"look at code, once a call": 1000, "check, before each step": 300}  # what is timed, times in a round
OPTIONS = (
    Option("layers", 32, "Decoder layers of the model."),
    Option("repeats", 11, "Rounds, of which the fastest counts."),
)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Print microseconds."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=asked.layers, **SIZES)).eval()
    accelpatch.patch(model, "exact", verify=False)
    code, watch = vars(model)[CODE], Watch(model)

    def look() -> None:
        with code:
            pass

    calls = (look, lambda: watch.stale() or watch.objection() or watch.watched())
    rows = [
        {"what": name, "taken, us": min(timeit.repeat(call, number=number, repeat=asked.repeats)) / number * 1e6}
        for (name, number), call in zip(CASES.items(), calls, strict=True)
    ]
    modules = sum(1 for _ in model.modules())
    return {"rows": table(rows, f"{asked.layers} layers, {modules} modules, fastest of {asked.repeats} rounds")}
