"""The choice of a recipe among measured ones, and the child processes in which they are measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from accelpatch.bench.generate import Shape
from accelpatch.errors import AccelpatchError
from accelpatch.recipe import recipe as recipes
from accelpatch.trials import recipe_named, tune_auto, tuned_recipe
from accelpatch.tuning import auto, children
from accelpatch.tuning.auto import Bounds, Candidate

SHAPE = Shape(1, 8, 4)
GB = 10**9
#: recipe -> (seconds of a call, KL)
FIGURES = {"original": (1.0, 0.0), "exact": (0.9, 0.0), "int8": (0.5, 0.003), "int4": (0.3, 0.4), "awq": (0.31, 0.1)}
EVERY = [
    Candidate("exact", 4 * GB, 4, alike="e", same="e"),
    Candidate("compact", 4 * GB, 4, alike="e", same="e"),
    Candidate("int8", 2 * GB, 2, alike="8", same="8"),
    Candidate("int4", 1 * GB, 1, alike="4", same="4"),
    Candidate("awq", 1 * GB, 1, alike="4", same="4 awq", calibrates=True),
]


class Runs:
    """Answers trials from FIGURES, and counts them."""

    def __init__(self, changes: Mapping[str, Any] | None = None, beside: Mapping[str, float] | None = None) -> None:
        self.tried: list[str] = []
        self.limits: list[float] = []
        self.hopeless: list[float] = []
        self.confirmed: list[str] = []
        self._figures: dict[str, Any] = {**FIGURES, **(changes or {})}
        self._beside = beside or {}

    def run(self, name: str, seconds: float, hopeless: float) -> Mapping[str, Any] | str:
        self.tried.append(name)
        self.limits.append(seconds)
        self.hopeless.append(hopeless)
        found = self._figures[name]
        if isinstance(found, str):
            return found
        return {"prefill": 0.1, "decode": found[0] - 0.1, "kl": found[1], "top1": 0.9}

    def confirm(self, name: str, seconds: float, hopeless: float) -> Mapping[str, Any] | str:
        self.confirmed.append(name)
        found = self._figures[name]
        return {"prefill": 0.1, "decode": self._beside.get(name, found[0]) - 0.1, "original_seconds": 1.0}

    def search(self, bounds: Bounds, **options: Any) -> auto.Search:
        return auto.search(EVERY, self.run, self.confirm, SHAPE, bounds, **options)


def test_the_fastest_within_the_bounds_is_chosen() -> None:
    runs = Runs()
    found = runs.search(Bounds(0.02, 10))
    assert found.chosen is not None
    assert found.chosen.name == "int8"
    assert runs.tried == ["original", "int4", "int8", "exact", "awq"]  # the fewest bytes first, calibrated ones last
    assert runs.hopeless[1:] == [2.0, 2.0, 1.0, 1.0]  # twice the fastest within the bounds so far
    assert runs.confirmed == ["int8"]
    assert found.skipped == {"compact": "it is the same here as exact"}


def test_without_bounds_the_fastest_of_all() -> None:
    runs = Runs()
    found = runs.search(Bounds())
    assert found.chosen is not None
    assert found.chosen.name == "int4"
    assert found.skipped["awq"] == "it runs as fast as int4, which is within the bounds"


def test_calibration_is_left_out_where_it_could_not_be_the_fastest() -> None:
    runs = Runs({"int4": (0.6, 0.4)})
    found = runs.search(Bounds(0.02))
    assert found.skipped["awq"] == "it runs as fast as int4, and int8 is faster"


def test_what_is_planned_too_large_is_not_tried() -> None:
    runs = Runs()
    found = runs.search(Bounds(gb=1.5))
    assert "int8" not in runs.tried
    assert found.skipped["int8"] == "it takes 2.00 GB, more than 1.5 GB"
    assert found.chosen is not None
    assert found.chosen.name == "int4"


def test_a_peak_over_the_bound_does_not_count() -> None:
    runs = Runs()

    def run(name: str, seconds: float, hopeless: float) -> Any:
        return {**dict(runs.run(name, seconds, hopeless)), **({"peak": 9e9} if name == "int4" else {})}  # type: ignore[arg-type]

    found = auto.search(EVERY, run, runs.confirm, SHAPE, Bounds(gb=5))
    assert found.chosen is not None
    assert found.chosen.name != "int4"


def test_what_fails_or_hangs_is_named_and_skipped() -> None:
    found = Runs({"int8": "it did not end within 3 s, and was killed"}).search(Bounds(0.02))
    assert found.chosen is not None
    assert found.chosen.name == "exact"
    assert next(one.failed for one in found.trials if one.name == "int8").startswith("it did not end within 3 s")


def test_bounds_that_nothing_meets_name_the_nearest() -> None:
    runs = Runs({"exact": (0.9, 0.002)})
    found = runs.search(Bounds(0.001, 10))
    assert found.chosen is None
    assert found.refused.startswith("no recipe is within KL 0.001 nats and 10 GB: the nearest is exact with KL 0.002")
    assert runs.confirmed == []


def test_never_one_that_is_slower_than_the_original() -> None:
    slow = {name: (1.0 + seconds, kl) for name, (seconds, kl) in FIGURES.items() if name != "original"}
    found = Runs(slow).search(Bounds(0.02))
    assert found.chosen is None
    assert "faster than the original" in found.refused


def test_one_that_is_slower_when_both_run_in_one_process_is_not_taken() -> None:
    runs = Runs(beside={"int8": 1.2})
    found = runs.search(Bounds(0.02))
    assert runs.confirmed == ["int8", "exact"]
    assert found.chosen is not None
    assert found.chosen.name == "exact"
    assert "slower than the original when both ran" in found.skipped["int8"]


def test_an_original_that_fails_is_an_error() -> None:
    with pytest.raises(AccelpatchError, match="the original could not be measured: out of memory"):
        Runs({"original": "out of memory"}).search(Bounds())


def test_the_time_of_all_trials_bounds_them() -> None:
    runs = Runs()

    def slow(name: str, seconds: float, hopeless: float) -> Any:
        time.sleep(0.3)
        return runs.run(name, seconds, hopeless)

    found = auto.search(EVERY, slow, runs.confirm, SHAPE, Bounds(), limit=100.0, budget=0.5)
    assert found.skipped["exact"] == "the time of all trials, 0.5 s, was over"
    assert runs.limits[0] == 100.0
    assert max(runs.limits[1:]) <= 0.125  # a quarter of it, and no more than what is left


ALONE = [Candidate("exact", GB, 4, compiles=True, skipped="it replaces nothing here"), EVERY[2]]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [pytest.param(0.3, "int8 with compile: default", id="faster"), pytest.param(0.495, "int8", id="no faster")],
)
def test_compiled_code_is_taken_where_it_is_faster(seconds: float, chosen: str) -> None:
    runs = Runs({f"int8{auto.COMPILED}": (seconds, 0.003)})
    every = [ALONE[0], replace(EVERY[2], compiles=True)]
    found = auto.search(every, runs.run, runs.confirm, SHAPE, Bounds())
    assert found.chosen is not None
    assert found.chosen.name == chosen
    said = found.skipped.get(f"int8{auto.COMPILED}", "")
    assert said == ("" if chosen != "int8" else "a call takes 0.495 s, and 0.5 s without: it is left off")


def test_a_model_of_which_nothing_is_replaced_can_be_compiled() -> None:
    runs = Runs({f"exact{auto.COMPILED}": (0.4, 0.0)})
    found = auto.search(ALONE[:1], runs.run, runs.confirm, SHAPE, Bounds())
    assert found.chosen is not None
    assert found.chosen.name == "exact with compile: default"
    assert recipe_named(found.chosen.name).runtime.compile == "default"
    assert recipe_named("exact").runtime.compile == "off"


def test_fused_layers_are_not_compiled() -> None:
    runs = Runs()
    runs.search(Bounds())
    assert not any(name.endswith(auto.COMPILED) for name in runs.tried)


def test_the_recipe_is_written_with_its_figures(tmp_path: Any) -> None:
    runs = Runs()
    found = tune_auto("smollm2-135m", runs.run, runs.confirm, SHAPE, Bounds(0.02), names=("exact", "int8"))
    text = tuned_recipe(found, "smollm2-135m", "cpu")
    assert "# a generate() call takes 0.5 s, that of the original 1 s (2.00 x); KL 0.003 nats" in text
    file = tmp_path / "tuned.yaml"
    file.write_text(text)
    written = recipes.load(file)
    assert (written.name, written.rules) == ("tuned-int8", recipes.load("int8").rules)


def test_recipes_that_do_not_fit_the_model_are_named(tmp_path: Any) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("rules: [{match: {name: transformer.h.*}, replace: int8_weight_only}]")
    names = ("int8", str(other), "gguf")
    runs = Runs()
    found = tune_auto("smollm2-135m", runs.run, runs.confirm, SHAPE, Bounds(), names=names)
    assert runs.tried == ["original", "int8"]
    assert found.skipped[str(other)].startswith("it does not fit the model: ")
    assert found.skipped["gguf"] == "it holds the weights of a GGUF file as they are stored"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("import time; time.sleep(60)", "it did not end within 2 s, and was killed", id="hangs"),
        pytest.param("import os; os.kill(os.getpid(), 11)", "it was ended by SIGSEGV", id="crashes"),
        pytest.param("import sys; sys.exit('error: no such model')", "no such model", id="fails"),
        pytest.param("print('no')", "it printed no JSON", id="says no JSON"),
    ],
)
def test_children_that_go_wrong(code: str, said: str) -> None:
    assert children.run_json([sys.executable, "-c", code], 2) == said


def test_a_child_that_answers() -> None:
    code = "import os; print('loading'); print('{\"a\": %s}' % os.environ['SAID'])"
    assert children.run_json([sys.executable, "-c", code], 20, {"SAID": "3"}) == {"a": 3}


def test_what_a_killed_child_started_ends_too(tmp_path: Any) -> None:
    file = tmp_path / "still there"
    inner = f"import time; time.sleep(3); open({str(file)!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}]); time.sleep(60)"
    assert "killed" in str(children.run_json([sys.executable, "-c", code], 1))
    time.sleep(4)
    assert not file.exists()
