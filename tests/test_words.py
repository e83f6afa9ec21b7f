"""Words of a private vocabulary stay out of code, docs and messages; the field has its own for these things."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: not -> but
WORDS = {
    "tell": "signal",
    "tells": "signals",
    "told": "signalled",
    "hear": "wait for",
    "hears": "waits for",
    "heard": "consumed",
    "hearer": "consumer",
    "slate": "sentinel-filled output buffer",
    "wipe": "reset",
    "wiped": "reset",
    "fiber": "emulated thread",
    "fibers": "CPU emulator of the SIMT model",
    "crew": "thread pool",
    "letter": "distributed shared memory buffer",
    "letters": "distributed shared memory buffers",
    "boxes": "mbarriers",
    "look_again": "spin",
    "guess": "draft token",
    "guesses": "draft tokens",
    "guessed": "drafted",
}
#: where such a word means what it means in English
ENGLISH = re.compile(r"lower.case letters|letters, digits|\"cache\", \"wipe\"")
SUFFIXES = {".py", ".h", ".hip", ".cpp", ".inc", ".md", ".yaml", ".toml", ".sh", ".cu", ""}
FOUND = re.compile(r"(?<![A-Za-z])(" + "|".join(WORDS) + r")(?![A-Za-z])", re.IGNORECASE)


def files() -> list[str]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in tracked if Path(name).suffix in SUFFIXES and name != "tests/test_words.py"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_the_words_are_those_of_the_field() -> None:
    found = [
        f"{name}:{number}: {match[0]!r}; say {WORDS[match[0].lower()]!r}: {line.strip()[:80]}"
        for name in files()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        for match in FOUND.finditer(ENGLISH.sub("", line))
    ]
    assert found == []


@pytest.mark.parametrize("line", ["told_of = 1", "It tells the next.", "Crew* crew", "heard_by_down(", "LETTER_BYTES"])
def test_they_are_found(line: str) -> None:
    assert FOUND.search(line)


@pytest.mark.parametrize("line", ["intelligent", "shear", "thread_pool", "a name of letters, digits and _"])
def test_others_are_not(line: str) -> None:
    assert not FOUND.search(ENGLISH.sub("", line))
