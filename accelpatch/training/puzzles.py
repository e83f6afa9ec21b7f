"""The default task: puzzles with three characters of the alphabet, which a small model cannot do and soon learns.

"Reverse: c a t" -> "t a c", "Sort: c a t" -> "a c t", "Next: c a t" -> "d b u" (the next in the alphabet, a after z).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from string import ascii_lowercase as ALPHABET

from accelpatch.training.rows import Row

ROWS, HELD_OUT = 768, 100
LENGTH = 3
SEED = 70
KINDS: dict[str, Callable[[str], list[str]]] = {
    "Reverse": lambda word: list(reversed(word)),
    "Sort": sorted,
    "Next": lambda word: [ALPHABET[(ALPHABET.index(one) + 1) % len(ALPHABET)] for one in word],
}


def as_rows(preferences: bool = False, train: int = ROWS, held_out: int = HELD_OUT) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and others to evaluate on; always the same, and no prompt twice.

    preferences: rows of DPO, in which the answer to another kind of puzzle is the rejected one.
    """
    chosen = random.Random(SEED)
    found: dict[str, dict[str, str]] = {}
    while len(found) < train + held_out:
        kind = chosen.choice(sorted(KINDS))
        word = "".join(chosen.choice(ALPHABET) for _ in range(LENGTH))
        answers = {name: " ".join(make(word)) for name, make in KINDS.items()}
        others = sorted({answers[name] for name in KINDS} - {answers[kind]})
        values = {"prompt": f"{kind}: {' '.join(word)}", "completion": answers[kind]}
        if preferences:
            values |= {"chosen": values.pop("completion"), "rejected": chosen.choice(others)}
        found[values["prompt"]] = values
    made = [Row(place, values) for place, values in enumerate(found.values(), 1)]
    return made[held_out:], made[:held_out]
