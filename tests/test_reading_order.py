"""docs/architecture.md's way of a token is the way that the ids take: the files in the order of their calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiny import CAUSAL

ROOT = Path(accelpatch.__file__).parent
PAGE = ROOT.parent / "docs" / "architecture.md"
MOST = 12
IDS = {"ids", "tokens", "input_ids"}
#: files that get ids too: they ask for the device, pages or padding, or are the operations of embedding and sampler
OTHERS = {
    "patching/placement.py",
    "runtime/continuous/pages.py",
    "runtime/model_runtime.py",
    "fusion/padding.py",
    "kernels/cpu/linear.py",
    "kernels/ops/sampling/greedy.py",
}
Calls = list[tuple[str, str, bool]]  # file, qualified name of the function, whether it got ids


def table(title: str) -> list[tuple[list[str], list[str]]]:
    """(files, functions) of each row."""
    text = PAGE.read_text().partition(f"\n{title}:\n\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in text.splitlines()[2:]]
    return [(re.findall(r"`([^`]+)`", files), re.findall(r"`([^`]+)`", names)) for _, files, names in rows]


def calls_of(run: Callable[[], Any]) -> Calls:
    """What was called of this package meanwhile."""
    found: Calls = []

    def seen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            values = frame.f_locals
            own = any(isinstance(values.get(name), torch.Tensor) for name in IDS)
            given = any(isinstance(one, dict) and "input_ids" in one for one in values.values())
            found.append((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname, own or given))

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(params=["On a GPU", "On a CPU"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The title of a table; a CPU stands for the GPU."""
    if request.param == "On a GPU":
        monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
        monkeypatch.setattr(native_library, "why_not", lambda device: "not in this test")
    return str(request.param)


def test_the_files_are_few_and_in_the_order_of_the_calls(way: str) -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8" if way == "On a CPU" else "exact", verify=False)
    ids = torch.arange(2, 9)[None]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    model.generate(ids, **given)  # from here on there is nothing left to capture
    calls = calls_of(lambda: model.generate(ids, **given))
    rows = table(way)
    files = [file for row, _ in rows for file in row]
    assert len(files) == len(set(files)) <= MOST
    first = []
    for (file,), names in [row for row in rows if row[0][0].endswith(".py")]:
        for name in names:
            assert any(one == file and name in called.split(".") for one, called, _ in calls), f"{file}: {name}"
        within = (
            place for place, (one, called, _) in enumerate(calls) if one == file and names[0] in called.split(".")
        )
        first.append(next(within))
    assert first == sorted(first)
    assert {file for file, _, got in calls if got} - set(files) - OTHERS == set()
