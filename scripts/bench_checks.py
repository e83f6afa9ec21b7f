"""What a call of a patched model pays for checks: the look at code, and the check of the model before each step.

    python scripts/bench_checks.py [--layers 32] [--repeats 11] [--json FILE]

The look (runtime/code_watch.py) is once a call of the model or of generate(); the other (runtime/watch.py) is before
each step. A Llama of small layers on the CPU, in recipe `exact`: only the number of modules matters. Fastest of
`--repeats` rounds of 1,000 looks and of 300 checks.
"""

from __future__ import annotations

import argparse
import json
import timeit
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.watch import Watch

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}


def microseconds(function: Any, number: int, repeats: int) -> float:
    return min(timeit.repeat(function, number=number, repeat=repeats)) / number * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="Decoder layers of the model.")
    parser.add_argument("--repeats", type=int, default=11, help="Rounds, of which the fastest counts.")
    parser.add_argument("--json", type=Path, help="Also write the figures to this file.")
    given = parser.parse_args()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=given.layers, **SIZES)).eval()
    accelpatch.patch(model, "exact", verify=False)
    code, watch = vars(model)[CODE], Watch(model)

    def look() -> None:
        with code:
            pass

    found = {
        "look at code, us a call": microseconds(look, 1000, given.repeats),
        "check, us a step": microseconds(
            lambda: watch.stale() or watch.objection() or watch.watched(), 300, given.repeats
        ),
    }
    print(f"{given.layers} layers, {sum(1 for _ in model.modules())} modules")
    print("\n".join(f"{name}: {value:.1f}" for name, value in found.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
