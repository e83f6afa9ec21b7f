"""A plugin of pytest: patches every model that a test uses, and writes one line of JSON for each test.

    pytest -p transformers_tests.plugin --records FILE --patch-with int8 --only FILE --older-names FILE

It loads before the tests are imported. Without --patch-with nothing is patched. Tests that the records have already are
left out, so that a run whose process ended goes on behind the test that ended it.
"""

from __future__ import annotations

import ast
import json
import random
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

# Mixins whose tests need several devices: their modules also import what another version of transformers may lack.
OF_SEVERAL_DEVICES = ("fsdp", "tensor_parallel", "expert_parallel")
KEPT_TEXT = 6000  # characters of a failure's end


class OutOfTime(BaseException):
    """A test ran longer than its limit; no `except Exception` of a test may catch it."""


class _Mixin(types.ModuleType):
    """A module whose every class is empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Records:
    """Writes what became of each test; patches are noted for the test that runs."""

    def __init__(self, file: Path, seconds: int) -> None:
        self.file, self.seconds, self.now = file, seconds, dict[str, Any]()

    def write(self) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps(self.now) + "\n")

    def patched(self, model: Any) -> None:
        self.now["sites"] = self.now.get("sites", 0) + model.accelpatch.report().replaced
        self.now["models"] = self.now.get("models", 0) + 1

    def left(self, model: Any, reason: str) -> None:
        self.now.setdefault("left", []).append(f"{type(model).__name__} {reason}"[:300])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """The limit holds for the test's body; a first line says which test runs, should the process end in it."""
        self.now = {"test": item.nodeid, "outcome": "started"}
        self.write()
        try:
            return (yield)
        finally:
            self.write()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Time is that of the process: another load of the machine lets no test fail."""
        _seed()
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        only, done = config.option.only, {one["test"] for one in read(self.file)}
        wanted = set(only.read_text().splitlines()) if only else {item.nodeid for item in items}
        items[:] = [item for item in items if item.nodeid in wanted and item.nodeid not in done]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test with parts fails with the first of them that does."""
        if report.failed and "error" not in self.now:
            self.now |= {"outcome": "failed", "error": _error(report)}
        elif not hasattr(report, "context") and "error" not in self.now and (report.when == "call" or report.skipped):
            self.now["outcome"] = report.outcome  # a report with a context is of a part
        if report.when == "call":
            self.now["seconds"] = round(report.duration, 2)


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file, the last of each test."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return list({one["test"]: one for one in map(json.loads, lines)}.values())


def _seed() -> None:
    """The same random inputs for a test with and without a patch."""
    random.seed(0)
    torch.manual_seed(0)
    if common := sys.modules.get("tests.test_modeling_common"):
        common.global_rng.seed(0)  # what makes the ids and the floats of its inputs


def _error(report: Any) -> dict[str, str]:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr)[-KEPT_TEXT:]
    return {
        "message": (crash.message if crash else text)[:1500],
        "where": f"{crash.path}:{crash.lineno}" if crash else "",
        "text": text,
    }


def _late(*_: Any) -> None:
    raise OutOfTime("the test ran longer than its limit")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--patch-with", default="", help="The recipe; none: nothing is patched.")
    parser.addoption("--records", type=Path, required=True, help="The file to append lines of JSON to.")
    parser.addoption("--only", type=Path, help="A file with the names of the tests to run.")
    parser.addoption("--test-seconds", type=int, default=120, help="Longest time of a test, of the processor.")
    parser.addoption("--older-names", type=Path, help="testing_utils.py of the version that the tests are of.")


def pytest_configure(config: Any) -> None:
    for name in OF_SEVERAL_DEVICES:
        sys.modules[f"tests.test_{name}_mixin"] = _Mixin(f"tests.test_{name}_mixin")
    if config.option.older_names:
        _add_constants(config.option.older_names)
    signal.signal(signal.SIGPROF, _late)
    records = Records(config.option.records, config.option.test_seconds)
    config.pluginmanager.register(records)
    if config.option.patch_with:
        import accelpatch

        stack = ExitStack()
        context = accelpatch.patch_on_first_use(
            config.option.patch_with, verify=False, on_patched=records.patched, on_left=records.left
        )
        stack.enter_context(context)
        config.add_cleanup(stack.close)


def _add_constants(file: Path) -> None:
    """Constants of an older testing_utils that the installed one has no more; its tests import them."""
    from transformers import testing_utils

    for line in ast.parse(file.read_text()).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Dict) and isinstance(line.targets[0], ast.Name):
            name = line.targets[0].id
            if not hasattr(testing_utils, name):
                setattr(testing_utils, name, ast.literal_eval(line.value))
