"""`quantize` that was interrupted goes on where it was, and reuses nothing that it should not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch import api
from accelpatch.checkpoints.save import unfinished_folder
from accelpatch.errors import SaveError
from accelpatch.quant import int4, int8
from tests.support.checkpoints import digests, logits, opened, weights
from tests.support.packed import plain

DONE = 5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often weights were quantised, by format."""
    counted: Counter[str] = Counter()
    for form in (int8, int4):
        name, stock = form.__name__.rpartition(".")[2], form.quantize

        def quantize(*arguments: Any, _name: str = name, _stock: Any = stock, **options: Any) -> Any:
            counted[_name] += 1
            return _stock(*arguments, **options)

        monkeypatch.setattr(form, "quantize", quantize)
    return counted


def _interrupt(stage: str, done: int, total: int) -> None:
    if stage == "quantising" and done == DONE:
        raise KeyboardInterrupt


def _interrupted(floats: Path, out: Path, recipe: str = "int4") -> None:
    with pytest.raises(KeyboardInterrupt):
        api.quantize(str(floats), recipe, out, progress=_interrupt)
    assert not out.exists()
    assert len(list(unfinished_folder(out).iterdir())) == DONE


@pytest.fixture
def whole(floats: Path, tmp_path: Path) -> dict[str, str]:
    """Digests of what comes out of a call that is not interrupted."""
    api.quantize(str(floats), "int4", tmp_path / "whole")
    return digests(tmp_path / "whole")


def test_it_goes_on(floats: Path, tmp_path: Path, whole: dict[str, str], calls: Counter[str]) -> None:
    _interrupted(floats, tmp_path / "out")
    first = calls.copy()
    calls.clear()
    stages: list[tuple[str, int, int]] = []
    api.quantize(
        str(floats), "int4", tmp_path / "out", progress=lambda stage, done, total: stages.append((stage, done, total))
    )
    assert digests(tmp_path / "out") == whole
    assert first.total() == DONE
    assert calls.total() == 15 - DONE
    assert [done for stage, done, _ in stages if stage == "quantising"] == [*range(1, 16)]
    assert {total for stage, _, total in stages if stage == "quantising"} == {15}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floats", "out", "whole"]
    assert torch.equal(logits(opened(tmp_path / "out")), logits(accelpatch.patch(plain("llama"), "int4")))


def test_another_recipe(floats: Path, tmp_path: Path, calls: Counter[str]) -> None:
    """The tied table is the same by both."""
    _interrupted(floats, tmp_path / "out", "int8")
    calls.clear()
    api.quantize(str(floats), "int4", tmp_path / "out")
    assert calls["int4"] == 14
    accelpatch.patch(plain("llama"), "int4").save_pretrained(tmp_path / "due")
    assert weights(tmp_path / "out") == weights(tmp_path / "due")


def test_other_weights(floats: Path, tmp_path: Path, calls: Counter[str]) -> None:
    _interrupted(floats, tmp_path / "out")
    calls.clear()
    model = plain("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(floats)
    api.quantize(str(floats), "int4", tmp_path / "out")
    assert calls.total() == 15
    accelpatch.patch(model, "int4").save_pretrained(tmp_path / "due")
    assert weights(tmp_path / "out") == weights(tmp_path / "due")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _emptied, _flipped], ids=lambda one: one.__name__.strip("_"))
def test_a_stored_weight_that_is_damaged(
    floats: Path, tmp_path: Path, whole: dict[str, str], calls: Counter[str], damage: Any
) -> None:
    _interrupted(floats, tmp_path / "out")
    calls.clear()
    damage(sorted(unfinished_folder(tmp_path / "out").iterdir())[0])
    api.quantize(str(floats), "int4", tmp_path / "out")
    assert calls.total() == 15 - DONE + 1
    assert digests(tmp_path / "out") == whole


def test_a_full_disk(floats: Path, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelpatch.checkpoints import resume

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(resume.os, "replace", full)
        with pytest.raises(SaveError, match="free some space"):
            api.quantize(str(floats), "int4", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    api.quantize(str(floats), "int4", tmp_path / "out")
    assert digests(tmp_path / "out") == whole


def test_what_is_stored_outlives_a_save_that_fails(
    floats: Path, tmp_path: Path, whole: dict[str, str], calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished weights are removed once the folder is written, and not before."""
    from accelpatch.checkpoints import save

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(save, "write_weights", fails)
        with pytest.raises(KeyboardInterrupt):
            api.quantize(str(floats), "int4", tmp_path / "out")
    calls.clear()
    api.quantize(str(floats), "int4", tmp_path / "out")
    assert calls.total() == 0
    assert digests(tmp_path / "out") == whole
    assert not unfinished_folder(tmp_path / "out").exists()


def test_an_error_in_the_middle(floats: Path, tmp_path: Path, whole: dict[str, str]) -> None:
    """Of the progress function, say: it comes out as it is, and nothing is half written."""

    def fails(stage: str, done: int, total: int) -> None:
        if stage == "quantising" and done == DONE:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        api.quantize(str(floats), "int4", tmp_path / "out", progress=fails)
    assert not (tmp_path / "out").exists()
    api.quantize(str(floats), "int4", tmp_path / "out")
    assert digests(tmp_path / "out") == whole
