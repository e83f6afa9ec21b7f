"""What a compiler does in the child process costs its form alone, is remembered, and is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelpatch import cache
from accelpatch.errors import CompileError
from accelpatch.kernels.triton import compile_guard, launch
from tests.support.interpreted import needs_triton

PROGRAM = "tests.kernels.triton.compiled_in_a_child"
ROOT = Path(__file__).parents[3]
BAD = {
    "aborts": "the compiler ended with SIGABRT: Assertion `it holds' failed.",
    "crashes": "the compiler ended with SIGSEGV: Assertion `it holds' failed.",
    "is killed": "the compiler ended with SIGKILL: Assertion `it holds' failed.",
    "raises": "ValueError: no such instruction",
}
ATTENTION = "attention, stages: "


def ran(folder: Path, **more: str) -> Any:
    """What the program prints, with caches of its own."""
    cached = {"TRITON_CACHE_DIR": str(folder / "code"), "ACCELPATCH_CACHE": str(folder / "ours")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | cached | more
    command = [sys.executable, "-W", "ignore", "-m", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Two programs one after the other, with the same caches."""
    folder = tmp_path_factory.mktemp("caches")
    return ran(folder), ran(folder)


@needs_triton
@pytest.mark.parametrize("way", BAD)
def test_a_compiler_that_ends_costs_its_form_alone(runs: tuple[Any, Any], way: str) -> None:
    for run in runs:
        said = run["said"][way]
        assert said.endswith(BAD[way])
        assert said.startswith("Triton ")
        assert "cannot compile compiled_in_a_child.kernel for gfx942: " in said


@needs_triton
def test_what_compiles_is_only_read_afterwards(runs: tuple[Any, Any]) -> None:
    for run in runs:
        assert run["said"]["runs"] == run["said"][f"{ATTENTION}1"] == ""
        assert set(run["hits"]) == {True}


@needs_triton
def test_what_will_not_change_is_remembered(runs: tuple[Any, Any]) -> None:
    first, second = runs
    assert first["asked"] == ["attend", "attend", "runs", *BAD]
    assert second["asked"] == ["is killed", "raises"]
    assert first["said"] == second["said"]


@needs_triton
def test_two_stages_of_64_queries_with_a_softcap(runs: tuple[Any, Any]) -> None:
    import triton

    if triton.__version__ != "3.9.0":
        pytest.skip("of another release of Triton that is not known")
    said = runs[0]["said"][f"{ATTENTION}2"]
    assert "cannot compile flash_attention.attend for gfx942: the compiler ended with SIGABRT: " in said
    assert "GCNRewritePartialRegUses.cpp" in said


def form(**changes: Any) -> compile_guard.Form:
    target = SimpleNamespace(backend="hip", arch="gfx942", warp_size=64)
    given: dict[str, Any] = {
        "module": "a.b", "name": "kernel", "source": "0", "signature": {"x": "*fp32"}, "constants": {(1,): 2},
        "attrs": {}, "target": target, "options": {"num_warps": 4},
    }  # fmt: skip
    return compile_guard.Form(**given | changes)


@needs_triton
@pytest.mark.parametrize(
    "changes",
    [
        {"source": "1"},
        {"name": "other"},
        {"signature": {"x": "*fp16"}},
        {"constants": {(1,): 3}},
        {"attrs": {(0,): [["tt.divisibility", 16]]}},
        {"target": SimpleNamespace(backend="hip", arch="gfx90a", warp_size=64)},
        {"options": {"num_warps": 8}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_each_part_of_a_form_counts(changes: dict[str, Any]) -> None:
    assert form().key == form().key
    assert form(**changes).key != form().key


@needs_triton
def test_each_release_of_triton_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    before = form().key
    monkeypatch.setattr(triton, "__version__", "99.0")
    assert form().key != before


@needs_triton
@pytest.mark.parametrize("folder", ["ours", "a link", "damaged"])
@pytest.mark.parametrize(
    "answer, reason, lasts",
    [
        ((0, "a warning"), "", True),
        ((-6, "LLVM ERROR: no\nand more"), "the compiler ended with SIGABRT: LLVM ERROR: no", True),
        ((-11, ""), "the compiler ended with SIGSEGV: exit code -11", True),
        ((-9, "killed"), "the compiler ended with SIGKILL: killed", False),
        ((1, "Traceback\nRuntimeError: a pass failed\n"), "RuntimeError: a pass failed", False),
        (None, "", False),
    ],
    ids=["it compiles", "aborts", "says nothing", "is killed", "raises", "no child"],
)
def test_with_and_without_a_cache(
    answer: tuple[int, str] | None, reason: str, lasts: bool, folder: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    place, asked = tmp_path / "cache", []
    monkeypatch.setenv("ACCELPATCH_CACHE", str(place))
    if folder == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    if folder == "damaged":
        cache.publish(compile_guard.KIND, form().key, lambda folder: None)
    monkeypatch.setattr(compile_guard, "_compiler", SimpleNamespace(compile=lambda form: (asked.append(1), answer)[1]))
    for times in (1, 2):  # as of two programs
        monkeypatch.setattr(compile_guard, "_known", {})
        for _ in range(2):
            if reason:
                with pytest.raises(CompileError, match=re.escape(f"cannot compile b.kernel for gfx942: {reason}")):
                    compile_guard.require(form())
            else:
                compile_guard.require(form())
        assert len(asked) == (1 if lasts and folder == "ours" else times)


def test_a_python_that_is_none_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, started = compile_guard.Compiler(), []
    start = compile_guard._started
    monkeypatch.setattr(compile_guard, "_started", lambda: (started.append(1), start())[1])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert compiler.compile(form()) is None
    assert compiler.compile(form()) is None
    assert len(started) == 2  # and is not tried again for each form


@pytest.mark.parametrize("attrs", [lambda: None, threading.Lock()], ids=["a local class", "a lock"])
def test_a_form_that_no_other_process_can_be_given(attrs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compile_guard.Compiler()
    monkeypatch.setattr(compile_guard, "_started", lambda: pytest.fail("a child has nothing to do"))
    assert compiler.compile(form(attrs=attrs)) is None


@pytest.mark.parametrize("hip", [None, "7.0"], ids=["NVIDIA", "AMD"])
def test_launches_are_guarded_on_amd_alone(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "guarded", lambda place: seen.append(place) or nullcontext())
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    with launch.on(tensor), launch.on_device(tensor), launch.on(torch.zeros(1)):
        pass
    assert len(seen) == (hip is not None)


@pytest.mark.parametrize("before", [None, lambda **given: given["fn"] == "theirs"], ids=["no hook", "a hook"])
def test_the_hook_of_a_program_stays(before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(hook=before)
    monkeypatch.setattr(compile_guard, "_hook", lambda: (owner, "hook"))
    asked: list[Any] = []
    monkeypatch.setattr(compile_guard, "require", asked.append)
    monkeypatch.setattr(compile_guard, "form_of", lambda kernel, given: given)

    def kernel(module: str) -> Any:
        return SimpleNamespace(jit_function=SimpleNamespace(fn=SimpleNamespace(__module__=module)))

    guard = compile_guard._Guard()
    with guard:
        with guard:  # as of a launch inside of another, and of two threads
            assert owner.hook == guard._ask
        assert owner.hook == guard._ask
        owner.hook(fn=kernel("accelpatch.kernels.triton.gemm"), compile="ours")
        owner.hook(fn=kernel("accelpatched.gemm"), compile="a stranger's")
        owner.hook(fn=kernel("__main__"), compile="a program's")
    assert owner.hook is before
    assert asked == ["ours"]
