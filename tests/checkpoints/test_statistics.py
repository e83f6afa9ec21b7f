"""Calibration statistics on disk: what is written comes back; damaged ones and those of another model are refused."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import accelpatch
from accelpatch.checkpoints.statistics import KEY, PARTS, load
from accelpatch.errors import AccelpatchError, LoadError, PatchError, SaveError
from accelpatch.quant.calibration import Statistics
from tests.support.checkpoints import header, rewritten
from tests.support.smoothing import made_up
from tests.support.tiny import CAUSAL, snapshot

NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def model() -> Any:
    return CAUSAL["llama"].make()


@pytest.fixture(scope="module")
def statistics(model: Any) -> Statistics:
    return made_up(model)


@pytest.fixture
def file(statistics: Statistics, tmp_path: Path) -> Path:
    accelpatch.save_statistics(statistics, tmp_path / "statistics.safetensors")
    return tmp_path / "statistics.safetensors"


def test_round_trip(statistics: Statistics, file: Path) -> None:
    found = load(file)
    assert (found.fingerprint, found.tokens) == (statistics.fingerprint, statistics.tokens)
    assert found.sites.keys() == statistics.sites.keys()
    for path, one in statistics.sites.items():
        for name in PARTS:
            held, due = getattr(found.sites[path], name), getattr(one, name)
            assert held is due is None or held.equal(due), (path, name)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_does_as_the_statistics_themselves(statistics: Statistics, file: Path) -> None:
    outputs = []
    for given in (statistics, file, str(file)):
        model = accelpatch.patch(CAUSAL["llama"].make(), "smoothquant", verify=False, statistics=given)
        outputs.append(model(torch.arange(2, 12)[None]).logits)
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])


@pytest.mark.parametrize("place", ["no/such/folder/file", ".", "read-only/file"])
def test_places_that_cannot_be_written(statistics: Statistics, tmp_path: Path, place: str) -> None:
    (tmp_path / "read-only").mkdir(mode=0o500)
    if place.startswith("read-only") and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    with pytest.raises(SaveError, match="name another file"):
        accelpatch.save_statistics(statistics, tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["read-only"]


def _facts(**changes: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        found, _ = header(file)
        facts = json.loads(found["__metadata__"][KEY])
        found["__metadata__"][KEY] = json.dumps({key: value for key, value in (facts | changes).items() if value != ()})
        rewritten(file, found)

    return change


def _text(text: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        found, _ = header(file)
        found["__metadata__"][KEY] = text
        rewritten(file, found)

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(file: Path) -> None:
        tensors, (found, _) = load_file(file), header(file)
        change(tensors)
        save_file(tensors, file, metadata=found["__metadata__"])

    return rewrite


SITE = "model.layers.0.mlp.up_proj"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda file: file.unlink(), "cannot be read as statistics"),
    "empty": (lambda file: file.write_bytes(b""), "cannot be read as statistics"),
    "a-text": (lambda file: file.write_text("It was the best of times."), "cannot be read as statistics"),
    "a-directory": (lambda file: (file.unlink(), file.mkdir()), "cannot be read as statistics"),
    "half": (lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]), "cannot be read"),
    "a-byte-short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cannot be read"),
    "a-byte-more": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "cannot be read"),
    "weights": (lambda file: save_file({"lm_head.weight": torch.ones(3, 3)}, file), "holds no calibration statistics"),
    "another-version": (_facts(version=2), "has version 2 of the format"),
    "no-version": (_facts(version=()), "holds no calibration statistics"),
    "no-fingerprint": (_facts(fingerprint=()), "holds no calibration statistics"),
    "a-fingerprint-that-is-a-number": (_facts(fingerprint=3), "has version 1"),
    "tokens-as-text": (_facts(tokens="many"), "has version 1"),
    "facts-that-are-no-json": (_text("{"), "holds no calibration statistics"),
    "facts-that-are-a-list": (_text("[1, 2]"), "holds no calibration statistics"),
    "facts-nested-without-end": (_text("[" * 100_000), "holds no calibration statistics"),
    "a-figure-missing": (_tensors(lambda t: t.pop(f"{SITE}.absmax")), "is damaged: .*absmax"),
    "a-foreign-figure": (_tensors(lambda t: t.update(extra=torch.ones(2))), "extra is no statistic"),
    "nan": (_tensors(lambda t: t[f"{SITE}.absmax"][3].fill_(float("nan"))), "negative or not finite"),
    "negative": (_tensors(lambda t: t[f"{SITE}.mean_square"][3].fill_(-1)), "negative or not finite"),
    "rows-with-nan": (_tensors(lambda t: t[f"{SITE}.rows"][1, 3].fill_(float("nan"))), "rows of an input"),
    "float64": (_tensors(lambda t: t.update({f"{SITE}.absmax": torch.ones(64).double()})), "float32"),
    "int8": (_tensors(lambda t: t.update({f"{SITE}.rows": torch.ones(8, 64, dtype=torch.int8)})), "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("damage, words", [pytest.param(*case, id=name) for name, case in DAMAGES.items()])
def test_damaged_files(model: Any, file: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(file)
    before = snapshot(model)
    with pytest.raises(LoadError, match=words):
        accelpatch.patch(model, "smoothquant", statistics=file)
    assert snapshot(model) == before


def _without(statistics: Statistics, path: str) -> Statistics:
    sites = {name: one for name, one in statistics.sites.items() if name != path}
    return Statistics(sites, statistics.fingerprint, statistics.tokens)


def _narrow(statistics: Statistics, path: str) -> Statistics:
    sites = dict(statistics.sites) | {path: statistics.sites["model.layers.0.mlp.down_proj"]}
    return Statistics(sites, statistics.fingerprint, statistics.tokens)


FOREIGN: dict[str, tuple[Callable[[Statistics], Statistics], str]] = {
    "another-model": (lambda _: made_up(CAUSAL["qwen2"].make()), "of another model, or of other weights"),
    "fewer-layers": (lambda _: made_up(CAUSAL["llama"].make(num_hidden_layers=1)), "of another model"),
    "a-site-missing": (lambda one: _without(one, SITE), f"nothing of {SITE}"),
    "a-site-of-another-size": (lambda one: _narrow(one, SITE), f"{SITE} are of 96 channels, and it has 64"),
}


@pytest.mark.parametrize("change, words", [pytest.param(*case, id=name) for name, case in FOREIGN.items()])
def test_statistics_of_another_model(model: Any, statistics: Statistics, change: Any, words: str) -> None:
    before = snapshot(model)
    with pytest.raises(PatchError, match=words):
        accelpatch.patch(model, "smoothquant", statistics=change(statistics))
    assert snapshot(model) == before


def test_statistics_of_the_model_before_it_was_trained(statistics: Statistics) -> None:
    model: Any = CAUSAL["llama"].make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    before = snapshot(model)
    with pytest.raises(PatchError, match="of other weights: calibrate this one"):
        accelpatch.patch(model, "smoothquant", statistics=statistics)
    assert snapshot(model) == before


def test_a_recipe_that_does_not_calibrate_reads_no_statistics() -> None:
    accelpatch.patch(CAUSAL["llama"].make(), "int8", verify=False, statistics="no/such/file")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The file with bytes changed, cut, repeated or removed; half of the time within its header."""
    held, end = bytearray(data), 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(min(end, len(held)) if rng.random() < 0.5 else len(held))
        kind = rng.randrange(5)
        if kind == 0:
            held[at] = rng.randrange(256)
        elif kind == 1:
            held[at : at + 4] = bytes(rng.randrange(256) for _ in range(4))
        elif kind == 2:
            del held[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            held[at:at] = held[at : at + rng.randrange(1, 40)]
        else:
            held[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b'"dtype":', b"1e999999"))
        if len(held) < 2:
            break
    return bytes(held)


@pytest.mark.parametrize(
    "seed, count", [pytest.param(1, 100, id="hundred"), pytest.param(2, 2000, id="two-thousand", marks=NIGHTLY)]
)
def test_mutations(statistics: Statistics, tmp_path: Path, seed: int, count: int) -> None:
    """Each is refused by an error of accelpatch's, or read as figures that are possible."""
    small = Statistics(dict(list(statistics.sites.items())[:3]), statistics.fingerprint, 9)
    file = tmp_path / "statistics.safetensors"
    accelpatch.save_statistics(small, file)
    data, rng, refused = file.read_bytes(), random.Random(seed), 0
    for _ in range(count):
        file.write_bytes(mutated(data, rng))
        try:
            found = load(file)
        except AccelpatchError:
            refused += 1
            continue
        for one in found.sites.values():
            assert bool(torch.stack([one.absmax, one.percentile, one.mean_square]).isfinite().all())
    assert count / 4 < refused < count
