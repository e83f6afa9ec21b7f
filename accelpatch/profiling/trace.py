"""A trace of torch's profiler as records: what ran, when, in which layer and operation.

On a GPU a record is a kernel, a copy or a fill. One that Python launched is named by the region that it was launched
in; one of a replayed graph by its place in the run that was recorded just before the capture, which launches the same
kernels in the same order. On a CPU a record is an operation of torch or of accelpatch, with the time that it spent
itself.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError
from accelpatch.profiling.recorder import PROGRAM, Region

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
ALIKE = 0.8  # of a graph's kernels and a recorded program's: less is another program
OURS = "accelpatch"  # in the arguments of a kernel's event, what was found of it


@dataclass(frozen=True)
class Record:
    """start, end: microseconds. own: those of its time in which nothing else ran that began earlier (GPU), or that it
    spent itself (CPU). waited: those in which a kernel before it still ran, since launches overlap. stream: of a GPU,
    or a CPU's thread. launch: the graph or call that launched it."""

    name: str
    start: float
    end: float
    own: float = 0.0
    waited: float = 0.0
    stream: str = ""
    launch: int = -1
    part: str = ""
    operation: str = ""
    region: str = ""
    in_graph: bool = False


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file in Chrome's JSON format. Raises AccelpatchError for any other and one cut off."""
    return read_timed(path)[0]


def read_timed(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events, and the nanoseconds since 1970 that their times count from; 0 where the file does not say."""
    document = _document(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(one, dict) for one in events):
        raise AccelpatchError(f"{path} has no list of traceEvents: it is no trace of torch's profiler")
    base = document.get("baseTimeNanoseconds", 0) if isinstance(document, dict) else 0
    return events, base if isinstance(base, int) else 0


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AccelpatchError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AccelpatchError(
            f"{path} is no trace, or it is cut off ({str(error)[:80]}): record it again, and let the program end"
        ) from error


def clock_offset(events: Iterable[Mapping[str, Any]], base: int, waits: Sequence[tuple[int, int]]) -> int:
    """Nanoseconds of a trace's clock less those of time.time_ns().

    base: nanoseconds that the trace counts from, by its own word, which drivers keep to some microseconds. waits: when
    this process called for the GPU to be waited for, and when it had been; the trace shows those calls, and the one
    that Python enclosed most closely says the difference best.
    """
    seen = [one for one in events if one.get("cat") in ON_HOST and "DeviceSync" in str(one.get("name"))]
    found = list[tuple[float, float]]()  # nanoseconds that are unsure, the offset
    for begun, ended in waits:
        if not seen:
            break
        one = min(seen, key=lambda event: abs(event["ts"] * 1e3 - begun + base))
        at, end = one["ts"] * 1e3, (one["ts"] + one["dur"]) * 1e3
        found.append((abs((ended - begun) - (end - at)), (at - begun + end - ended) / 2))
    return int(min(found)[1]) if found else -base


def complete(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events with a beginning and a duration that are numbers."""
    return [one for one in events if one.get("ph") == "X" and _is_number(one.get("ts")) and _is_number(one.get("dur"))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Marks:
    """The regions of a trace by thread; `at` finds the innermost one at a time."""

    def __init__(self, events: Sequence[Mapping[str, Any]], regions: Mapping[str, Region]):
        self._points: dict[Any, tuple[list[float], list[tuple[str, ...]]]] = {}
        by_thread: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for one in events:
            if one.get("cat") == "user_annotation" and one.get("name") in regions:
                by_thread[one.get("tid")].append((one["ts"], one["ts"] + one["dur"], one["name"]))
        for thread, spans in by_thread.items():
            self._points[thread] = _changes(sorted(spans, key=lambda span: (span[0], -span[1])))

    def at(self, thread: Any, time: float) -> tuple[str, ...]:
        """The names of the regions around a time, the outermost first."""
        alone = next(iter(self._points.values())) if len(self._points) == 1 else ([], [])
        times, names = self._points.get(thread, alone)  # of a GPU's calls the thread may have another number
        found = bisect_right(times, time) - 1
        return names[found] if found >= 0 else ()


def _changes(spans: Sequence[tuple[float, float, str]]) -> tuple[list[float], list[tuple[str, ...]]]:
    """The times at which the innermost region changes, and the regions from then on."""
    times: list[float] = []
    names: list[tuple[str, ...]] = []
    stack: list[tuple[float, str]] = []

    def note(time: float) -> None:
        times.append(time)
        names.append(tuple(name for _, name in stack))

    for begin, end, name in spans:
        while stack and stack[-1][0] <= begin:
            ended = stack.pop()[0]
            note(ended)
        stack.append((end, name))
        note(begin)
    while stack:
        ended = stack.pop()[0]
        note(ended)
    return times, names


def kernels(
    events: Sequence[Mapping[str, Any]], regions: Mapping[str, Region], programs: Sequence[Sequence[Record]] = ()
) -> list[Record]:  # fmt: skip
    """What ran on a GPU, in the order of its beginning. programs: of an earlier trace, see `captured`."""
    marks, launches = Marks(events, regions), _launches(events)
    found: list[Record] = []
    for one in sorted((one for one in events if one.get("cat") in ON_GPU), key=lambda one: one["ts"]):
        arguments = one.get("args") or {}
        number = arguments.get("correlation", -1)
        launch = launches.get(number)
        graph = launch is not None and "GraphLaunch" in str(launch.get("name"))
        around = () if launch is None else marks.at(launch.get("tid"), launch["ts"])
        record = Record(
            str(one.get("name")), one["ts"], one["ts"] + one["dur"], stream=str(arguments.get("stream", "")),
            launch=number if isinstance(number, int) else -1, in_graph=graph,
        )  # fmt: skip
        found.append(_named(record, [regions[name] for name in around if name != PROGRAM]))
    return _with_own_time(_named_graphs(found, programs))


def captured(events: Sequence[Mapping[str, Any]], regions: Mapping[str, Region]) -> list[list[Record]]:
    """The kernels of each program that was captured during a trace, in the order of their launches."""
    launches = _launches(events)
    times = [
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if one.get("cat") == "user_annotation" and one.get("name") == PROGRAM
    ]
    found = [one for one in kernels(events, regions) if not one.in_graph and one.launch in launches]
    made = []
    for begin, end in times:  # captures are one at a time
        at = ((launches[one.launch]["ts"], one) for one in found)
        inside = [(time, one) for time, one in at if begin <= time <= end]
        made.append([one for _, one in sorted(inside, key=lambda pair: pair[0])])
    return [one for one in made if one]


def _launches(events: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Number of a launch -> its event on the host."""
    hosts = (one for one in events if one.get("cat") in ON_HOST)
    return {one["args"]["correlation"]: one for one in hosts if "correlation" in (one.get("args") or {})}


def _named(record: Record, around: Sequence[Region]) -> Record:
    """A record with the part and operation of the regions around it; the innermost is last."""
    if not around:
        return record
    inner = around[-1]
    part = inner.part or next((one.part for one in reversed(around) if one.part), "")
    return replace(record, part=part, operation=inner.operation, region=inner.name)


def _named_graphs(records: Sequence[Record], programs: Sequence[Sequence[Record]]) -> list[Record]:
    """The records with the names of those of replayed graphs."""
    of_launch: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(records):
        if one.in_graph:
            of_launch[one.launch].append(place)
    made, known = list(records), dict[tuple[str, ...], list[Record | None]]()
    for places in of_launch.values():
        names = tuple(records[place].name for place in places)
        if names not in known:
            known[names] = _matched(names, programs)
        for place, like in zip(places, known[names], strict=True):
            if like is not None:
                made[place] = replace(made[place], part=like.part, operation=like.operation, region=like.region)
    return made


def _matched(names: tuple[str, ...], programs: Sequence[Sequence[Record]]) -> list[Record | None]:
    """For each kernel of a graph that of the program which it is a capture of; None for those that it has not."""
    best: list[Record | None] = [None] * len(names)
    most = ALIKE
    for program in programs:
        theirs = tuple(one.name for one in program)
        if theirs == names:
            return list(program)
        if min(len(theirs), len(names)) < ALIKE / (2 - ALIKE) * max(len(theirs), len(names)):
            continue
        compared = SequenceMatcher(None, names, theirs, autojunk=False)
        if compared.quick_ratio() >= most and (ratio := compared.ratio()) >= most:
            most, best = ratio, [None] * len(names)
            for block in compared.get_matching_blocks():
                for at in range(block.size):
                    best[block.a + at] = program[block.b + at]
    return best


def _with_own_time(records: Sequence[Record]) -> list[Record]:
    """The records with the time in which each ran alone of those before it; their sum is the union of all."""
    made, until = [], float("-inf")
    for one in records:
        own = max(0.0, one.end - max(one.start, until))
        made.append(replace(one, own=own, waited=one.end - one.start - own))
        until = max(until, one.end)
    return made


def host_operations(events: Sequence[Mapping[str, Any]], regions: Mapping[str, Region]) -> list[Record]:
    """What ran on a CPU in the thread that has most regions, in order; nothing of the profiler itself."""
    ours = [one for one in events if one.get("cat") == "user_annotation" and one.get("name") in regions]
    if not ours:
        return []
    threads = [one.get("tid") for one in ours]
    thread = max(set(threads), key=threads.count)
    mine = [
        one for one in events
        if one.get("tid") == thread and (one.get("cat") == "cpu_op" or
                                         (one.get("cat") == "user_annotation" and one.get("name") in regions))
    ]  # fmt: skip
    mine.sort(key=lambda one: (one["ts"], -one["dur"]))
    inside = _time_inside(mine)
    marks, made = Marks(events, regions), []
    for one, nested in zip(mine, inside, strict=True):
        around = [regions[name] for name in marks.at(thread, one["ts"]) if name != PROGRAM]
        name = str(one.get("name"))
        own = max(0.0, one["dur"] - nested)
        record = _named(Record(name, one["ts"], one["ts"] + one["dur"], own, stream=str(thread)), around)
        if one.get("cat") == "user_annotation":
            if regions[name].work is None:
                continue  # Python between operations
            record = replace(record, name=regions[name].operation.split()[0])
        made.append(record)
    return made


def _time_inside(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """For each event the time of those directly inside of it."""
    found, stack = [0.0] * len(events), list[int]()
    for place, one in enumerate(events):
        while stack and events[stack[-1]]["ts"] + events[stack[-1]]["dur"] <= one["ts"]:
            stack.pop()
        if stack:
            found[stack[-1]] += one["dur"]
        stack.append(place)
    return found


def with_names(events: Iterable[Mapping[str, Any]], records: Iterable[Record]) -> list[dict[str, Any]]:
    """The events of a trace, in which those on a GPU have layer and operation among their arguments."""
    known = {(one.name, one.start): one for one in records if one.region}
    made = []
    for event in events:
        found = known.get((str(event.get("name")), event.get("ts", 0.0))) if event.get("cat") in ON_GPU else None
        added = {} if found is None else {OURS: found.region}
        made.append({**event, "args": {**(event.get("args") or {}), **added}} if added else dict(event))
    return made
