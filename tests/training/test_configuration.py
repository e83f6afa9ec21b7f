"""Configurations of the finetune command: bundled, read, changed, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelpatch.errors import ArgumentError, RecipeError
from accelpatch.training import configuration


@pytest.mark.parametrize("name", configuration.bundled())
def test_a_bundled_one_is_what_it_prints(name: str, tmp_path: Path) -> None:
    found = configuration.load(name)
    assert found.description
    (tmp_path / "again.yaml").write_text(found.dump())
    assert configuration.load(tmp_path / "again.yaml") == found


def test_those_of_the_guides_are_there() -> None:
    assert set(configuration.bundled()) == {"puzzles", "lora", "qlora", "full", "lora-distributed", "dpo"}
    assert configuration.bundled()[0] == configuration.DEFAULT


def test_a_mapping() -> None:
    found = configuration.load({"recipe": "train", "batch": {"size": 2}, "optimizer": {"learning_rate": 1}})
    assert (found["recipe"], found["batch.size"], found["adapter.rank"]) == ("train", 2, 16)
    assert isinstance(found["optimizer.learning_rate"], float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch: {sise: 2}", r"a.yaml:1:9: unknown key 'sise' in batch; did you mean 'size'"),
        ("batsh: {size: 2}", "unknown key 'batsh'"),
        ("batch: 2", "batch must be a mapping"),
        ("batch: {size: 0}", "batch.size must be at least 1, not 0"),
        ("batch: {size: two}", "batch.size must be a whole number"),
        ("batch: {packing: 1}", "batch.packing must be true or false"),
        ("method: lore", "unknown method 'lore'; did you mean 'lora'"),
        ("data: {held_out: 1.5}", "data.held_out must be at most 0.9"),
        ("adapter: {targets: []}", "must not be an empty list"),
        ("", "the file is empty"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(RecipeError, match=said):
        configuration.load(tmp_path / "a.yaml")


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean 'qlora'"):
        configuration.load("qlorra")
    with pytest.raises(RecipeError, match="finetune --list"):
        configuration.load(tmp_path / "none.yaml")
    with pytest.raises(ArgumentError):
        configuration.load(7)  # type: ignore[arg-type]


def test_settings_of_the_command_line() -> None:
    given = ["batch.size=2", "adapter.targets=[q_proj, v_proj]", "optimizer.learning_rate=1e-3", "data.evaluation=null"]
    values = configuration.names_of(given)
    changed = configuration.load("lora").with_values(values)
    assert changed["adapter.targets"] == ["q_proj", "v_proj"]
    assert changed["optimizer.learning_rate"] == 1e-3
    differ = configuration.differences(configuration.load("lora"), changed)
    assert differ[0] == "adapter.targets: all-linear, ['q_proj', 'v_proj']"
    with pytest.raises(RecipeError, match=r"batch\.size must be at least 1"):
        changed.with_values({"batch.size": 0})
    with pytest.raises(RecipeError, match=r"did you mean 'batch\.size'"):
        configuration.setting("batch.sise=3")
    with pytest.raises(RecipeError, match=r"batch\.size=8"):
        configuration.setting("batch.size")
