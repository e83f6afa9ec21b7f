"""Words of a private vocabulary stay out of code, docs and messages; the field has its own for these things."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
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


#: parts of identifiers of kernels, runtime and fusion: not -> but
PARTS = {
    "wave": "warp",
    "turn": "stage",
    "ring": "stage buffer",
    "issue": "prefetch",
    "phase": "K tile",
    "digit": "limb",
    "powers": "block exponents",
    "span": "KV split",
    "node": "reduction level",
    "bunch": "reduction level",
    "record": "partial",
    "claim": "dynamic schedule",
    "share": "partition",
    "hand": "store_relaxed",
    "handed": "load_relaxed",
    "settle": "prefetch",
    "settled": "prefetchable",
    "product": "linear or mma",
    "turned": "rotated",
    "undone": "unpacked",
    "paired": "interleaved",
    "together": "concatenated",
    "choice": "sampler",
}
#: names of other libraries, a record of a report, and a replacer's Choice
STANDARD = re.compile(
    r"wave_size|waves|record_stream|_?record|records|SelftestRecord|_?scaled_dot_product_(cudnn_)?attention|(add|panel)_product|product|[Cc]hoice"
)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
C_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def identifiers(name: str, text: str) -> set[str]:
    """The identifiers of a Python or C++ file, without comments and literals."""
    if name.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}
    return set(re.findall(r"[A-Za-z_]\w*", C_NOISE.sub(" ", text)))


def private(identifier: str) -> list[str]:
    """The parts of an identifier that the field has another word for."""
    if STANDARD.fullmatch(identifier):
        return []
    parts = [part.lower() for part in PART.findall(identifier)]
    return [part for part in parts if part in PARTS or (part.endswith("s") and part[:-1] in PARTS)]


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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_identifiers_are_those_of_the_field() -> None:
    rooms = ("accelpatch/kernels/", "accelpatch/runtime/", "accelpatch/fusion/")
    code = [
        name
        for name in files()
        if name.startswith(rooms) and Path(name).suffix in {".py", ".h", ".hip", ".cpp", ".inc"}
    ]
    assert len(code) > 100
    found = {
        f"{name}: {one}; say {PARTS.get(part) or PARTS[part[:-1]]!r}"
        for name in code
        for one in identifiers(name, (ROOT / name).read_text())
        for part in private(one)
    }
    assert sorted(found) == []


@pytest.mark.parametrize(
    "name", ["SHARED_RING", "takes_turns", "ClaimingShare", "waves_shift", "KV_SPANS", "begin_choice"]
)
def test_private_identifiers_are_found(name: str) -> None:
    assert private(name)


@pytest.mark.parametrize("name", ["return_value", "string", "wave_size", "handle", "spanning", "record_stream"])
def test_other_identifiers_are_not(name: str) -> None:
    assert not private(name)


def test_comments_and_literals_are_no_identifiers() -> None:
    assert identifiers("a.h", 'int a = b("ring \\" turn");  // a span\n/* a node */ c') == {"int", "a", "b", "c"}
    assert identifiers("a.py", "a = 'ring'  # turn") == {"a"}
