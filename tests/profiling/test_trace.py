"""Traces: of a CPU as they are recorded; of a GPU as events in the form in which torch writes them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import accelpatch
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.errors import AccelpatchError
from accelpatch.kernels import regions
from accelpatch.profiling import run, trace
from accelpatch.profiling import summary as summaries
from accelpatch.profiling.recorder import PROGRAM, Region, RegionRecorder, recording
from accelpatch.profiling.trace import Record
from accelpatch.profiling.work import Work
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from tests.cli.conftest import Cli, byte_tokenizer, cli, save_model  # noqa: F401
from tests.support.one_thread import _one_thread  # noqa: F401
from tests.support.tiny import CAUSAL

LAUNCH = "cudaGraphLaunch"
QUICK = ("--prompt-tokens", "8", "--new-tokens", "8", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("profiling") / "tiny", tokenizer=byte_tokenizer()))


def test_both_models_on_a_cpu(cli: Cli, model: str, tmp_path: Path) -> None:  # noqa: F811
    done = cli("profile", "trace", model, "--compare", "--out", str(tmp_path / "out"), "--json", *QUICK)
    found = json.loads(done.stdout)
    page = (tmp_path / "out/profile.html").read_text()
    assert len(page) < 2_000_000
    for side, last in (("original", "layer 1"), ("patched", "layer 1 and head")):
        one = found[side]
        names = [row["name"] for row in one["by_layer"]]
        assert names[:2] == ["layer 0", last]
        assert one["steps"] == 6  # of 8 tokens the prompt's, and what follows the last beginning, are left out
        assert one["busy"] <= one["recorded"] == pytest.approx(one["busy"] + one["gaps"])
        assert f'<span title="{last}">' in page
        events = trace.read(Path(found["traces"][side]))
        assert any(event.get("name") == "layer 0" for event in events)
    assert found["patched"]["kernels"] < found["original"]["kernels"] / 4
    operations = {row["name"] for row in found["patched"]["by_operation"]}
    assert {"decode_step of a layer", "decode_step of a layer and the head"} <= operations
    assert regions.recorder is None


def test_the_native_step_computes_the_same_in_regions(model: str) -> None:
    network = accelpatch.load(model, "int8", device="cpu").model
    ids = prompt_ids(260, Shape(1, 8, 8))
    plain = generate(network, ids, 8)
    with recording(network, 12) as recorder:
        recorded = generate(network, ids, 8)
    assert torch.equal(plain, recorded)
    steps = [one for one in recorder.regions.values() if one.operation.startswith("decode_step")]
    assert [one.part for one in steps] == ["layer 0", "layer 1 and head"]
    assert network.accelpatch.report().paths["native step"] == 14  # of both calls: hooks of ours change no path
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("name", ["smollm3", "qwen3_moe", "gpt2"])
def test_models_whose_steps_are_modules_in_part(name: str) -> None:
    """Of a native step between modules too each layer has its time."""
    model = accelpatch.patch(CAUSAL[name].make(), "int8", verify=False)
    ids = prompt_ids(60, Shape(1, 8, 8))
    plain = generate(model, ids, 8)
    profile = run.record(model, Shape(1, 8, 8), repeats=1)
    assert torch.equal(plain, generate(model, ids, 8))
    assert profile.summary.steps == 6
    assert [row.name.removesuffix(" and head") for row in profile.summary.by_layer[:2]] == ["layer 0", "layer 1"]


class Replayed(EagerGraph):
    """Replays show in a trace as the launch of a graph does."""

    def replay(self) -> None:
        with record_function(LAUNCH):
            super().replay()


def as_on_a_gpu(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each operation of torch that runs no other becomes a launch and a kernel, twice as long so that kernels overlap;
    those of a replay have the launch of the graph, and no region is known inside of it."""
    whole = sorted(trace.complete(events), key=lambda one: (one["ts"], -one["dur"]))
    graphs = [one for one in whole if one["name"] == LAUNCH]
    operations = [one for one in whole if one.get("cat") == "cpu_op"]
    made: list[dict[str, Any]] = []
    for number, one in enumerate(graphs):
        made.append({**one, "cat": "cuda_runtime", "args": {"correlation": number}})

    def graph_of(one: Mapping[str, Any]) -> int | None:
        return next((n for n, g in enumerate(graphs) if g["ts"] <= one["ts"] < g["ts"] + g["dur"]), None)

    for place, one in enumerate(operations):
        following = operations[place + 1] if place + 1 < len(operations) else None
        if following is not None and following["ts"] < one["ts"] + one["dur"]:
            continue  # it runs another
        graph, number = graph_of(one), 10_000 + place
        if graph is None:
            made.append({**one, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": number}})
        correlation = number if graph is None else graph
        made.append(
            {**one, "cat": "kernel", "tid": 7, "dur": 2 * one["dur"], "args": {"correlation": correlation, "stream": 7}}
        )
    kept = (
        one for one in whole if one.get("cat") == "user_annotation" and one["name"] != LAUNCH and graph_of(one) is None
    )
    return made + [dict(one) for one in kept]


def recorded(model: nn.Module, new: int = 8) -> list[dict[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU]) as done:
        generate(model, prompt_ids(64, Shape(1, 6, new)), new)
    events = [
        {"ph": "X", "cat": "user_annotation" if one.is_user_annotation else "cpu_op", "name": one.name, "tid": 1,
         "ts": one.time_range.start, "dur": one.time_range.elapsed_us()}
        for one in done.events() or ()
    ]  # fmt: skip
    return as_on_a_gpu(events)


@pytest.fixture
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", Replayed)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_captured_on_the_cpu")
def test_kernels_of_graphs_have_the_names_of_their_capture() -> None:
    model = accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)
    with recording(model, 10) as recorder:
        programs = [one for _ in range(2) for one in trace.captured(trace.complete(recorded(model)), recorder.regions)]
        events = recorded(model)
    assert len(programs) == 3  # the step, the sampler, and at its second use the prompt
    found = trace.kernels(trace.complete(events), recorder.regions, programs)
    inside = [one for one in found if one.in_graph]
    assert len(inside) > 200
    assert sum(bool(one.region) for one in inside) > 0.97 * len(inside)
    assert {"layer 0", "layer 1", "head", "embedding"} <= {one.part for one in inside}
    by_name = {one.operation.split()[0] for one in inside if one.operation}
    assert {"rmsnorm", "decode_attention", "greedy", "step_end"} <= by_name | {
        one.operation.split()[0] for program in programs for one in program if one.operation
    }
    made = summaries.summary(found, 1e-3, "cuda")
    assert made.steps == 6
    assert made.launches < made.kernels / 10
    assert [row.name for row in made.by_layer[:2]] == ["layer 0", "layer 1"]
    whole = [one for step in summaries.steps_of(found) for one in step]
    assert all(one.region for one in whole if one.in_graph)
    assert made.busy * made.steps == pytest.approx(sum(one.own for one in whole))


def test_another_graph_is_not_named_by_a_program_that_it_is_not() -> None:
    program = [Record(name, 0, 1, part="layer 0", region="layer 0") for name in "abcdef"]
    assert [one and one.part for one in trace._matched(tuple("abcdef"), [program])] == ["layer 0"] * 6
    near = trace._matched(tuple("abxdef"), [program])
    assert [one is None for one in near] == [False, False, True, False, False, False]
    assert trace._matched(tuple("uvwxyz"), [program]) == [None] * 6
    assert trace._matched(tuple("ab"), [program]) == [None] * 2


def kernel(name: str, begin: float, end: float, launch: int = 0) -> dict[str, Any]:
    arguments = {"correlation": launch, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": arguments}


def test_times_of_kernels_that_overlap_add_up_to_their_union() -> None:
    events = [kernel("a", 0, 10), kernel("b", 4, 12), kernel("c", 5, 9), kernel("d", 20, 21)]
    found = trace.kernels(events, {})
    assert [(one.name, one.own, one.waited) for one in found] == [
        ("a", 10, 0), ("b", 2, 6), ("c", 0, 4), ("d", 1, 0),
    ]  # fmt: skip


def test_the_clock_of_a_trace_is_found_by_waits_that_it_shows() -> None:
    """The closest pair is the second: 10 us in the trace, 12 in the process, so that each end is 1 us off."""
    events = [
        {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": at, "dur": 10.0} for at in (100.0, 150.0, 5000.0)
    ]
    waits = [(1_060_000, 1_110_000), (1_149_000, 1_161_000)]
    assert trace.clock_offset(events, 1_001_000, waits) == -1_000_000
    assert trace.clock_offset([], 1_001_000, waits) == -1_001_000


def test_the_own_clock_gives_the_names_that_torchs_marks_give(model: str, tmp_path: Path) -> None:
    network = accelpatch.load(model, device="cpu").model
    found = []
    for by_profiler in (True, False):
        with recording(network, 12, by_profiler) as recorder:
            generate(network, prompt_ids(260, Shape(1, 8, 6)), 2)
            recorder.noted.clear()
            with profile(activities=[ProfilerActivity.CPU]) as done:
                generate(network, prompt_ids(260, Shape(1, 8, 6)), 6)
        done.export_chrome_trace(str(tmp_path / "trace.json"))
        events, base = trace.read_timed(tmp_path / "trace.json")
        whole = trace.complete(events) + recorder.events(-base)
        found.append(Counter((one.part, one.operation) for one in trace.host_operations(whole, recorder.regions)))
    marks, noted = found
    assert sum(marks.values()) > 500
    assert sum(((marks - noted) + (noted - marks)).values()) <= 0.02 * sum(marks.values())


def test_regions_noted_without_torchs_profile_of_the_cpu() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    with recording(model, 1, by_profiler=False) as recorder:
        model[0][0](torch.ones(2))
    (event,) = recorder.events(-1000)
    assert (event["name"], event["cat"]) == ("layer 0", "user_annotation")
    assert event["dur"] > 0
    assert recorder.events(0) == []


def test_an_operation_that_runs_twice_in_a_layer_has_two_names(model: str) -> None:
    network = accelpatch.load(model, "exact", device="cpu").model
    with torch.no_grad(), recording(network, 4) as recorder:  # norms that may train are torch's own operations
        network(torch.ones(1, 4, dtype=torch.int64))
        first = set(recorder.regions)
        network(torch.ones(1, 4, dtype=torch.int64))
    assert {"layer 0: rmsnorm 64 of 4 rows", "layer 0: rmsnorm 64 of 4 rows, 2"} <= first
    assert set(recorder.regions) == first


def test_work_counts_where_it_is_done() -> None:
    """An operation that runs others is theirs where they read what it reads, and its own where they do little."""
    recorder = RegionRecorder(1)
    for name, read in {"outer": 100, "linear": 90, "gated": 90, "activation": 10}.items():
        recorder.regions[name] = Region("", name, Work(read, 0, {}))
    recorder.note_inside("outer", "linear")
    recorder.note_inside("gated", "activation")
    assert recorder.composed == {"outer"}


def test_one_recording_at_a_time() -> None:
    model = nn.Linear(2, 2)
    with recording(model, 1), pytest.raises(AccelpatchError, match="another profile"), recording(model, 1):
        pass
    assert regions.recorder is None


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"traceEvents": [{"ph": "X", "ts": 1', "it is cut off"),
        ("", "it is cut off"),
        ('{"other": 1}', "no list of traceEvents"),
        ("[1, 2]", "no list of traceEvents"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(AccelpatchError, match=said):
        trace.read(tmp_path / "trace.json")


def test_events_without_numbers_are_skipped() -> None:
    bad: list[dict[str, Any]] = [{"ph": "X", "ts": "1", "dur": 2}, {"ph": "X", "ts": 1}, {"ph": "i", "ts": 1}, {}]
    assert trace.complete([*bad, kernel("a", 0, 1)]) == [kernel("a", 0, 1)]


def test_a_trace_without_steps() -> None:
    with pytest.raises(AccelpatchError, match="--new-tokens"):
        summaries.summary([Record("a", 0, 1)], 1.0, "cuda")


def test_the_marks_of_a_thread() -> None:
    known = {name: Region(name, "") for name in ("layer 0", "layer 1")} | {PROGRAM: Region("", PROGRAM)}
    spans = [(PROGRAM, 0, 100), ("layer 0", 10, 20), ("layer 1", 20, 40)]
    events = [
        {"cat": "user_annotation", "name": name, "tid": 1, "ts": begin, "dur": end - begin}
        for name, begin, end in spans
    ]
    marks = trace.Marks(events, known)
    found = [marks.at(1, time) for time in (-1, 5, 15, 20, 45, 100, 200)]
    assert found == [(), (PROGRAM,), (PROGRAM, "layer 0"), (PROGRAM, "layer 1"), (PROGRAM,), (), ()]
