"""Hardware counters that other tools recorded, in one form: databases of rocpd, CSVs, traces.

Formats: rocprofiler-sdk's documentation of `kernel_trace.csv` and `counter_collection.csv` and its SQL of the rocpd
views `kernels`, `kernel_pmc_events` and `counters_collection`; rocprof's `results.csv`; Nsight Compute's CLI manual
(`--csv`, pages details and raw); Perfetto's trace protocol. None of AMD's tools was run here: the readers are tested
with these formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError
from accelpatch.profiling import counter_csv, perfetto, rocpd, trace
from accelpatch.profiling.dispatch_record import DispatchRecord
from accelpatch.report import table

MOST_BYTES = 4 << 30
SUFFIXES = (".db", ".csv", ".json", ".pftrace", ".perfetto-trace")


@dataclass(frozen=True)
class KernelCounters:
    """All runs of one kernel. microseconds: of all of them; 0 where the file has no times. counters: name -> mean of a
    run. resources: name -> value, such as registers."""

    kernel: str
    runs: int
    microseconds: float
    counters: dict[str, float] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def read(path: Path) -> tuple[list[KernelCounters], list[str]]:
    """The kernels of a result, the longest first, and what was left out of it, with the reason.

    A folder is read file by file. Raises AccelpatchError for a file of another kind, one cut off, or one of a version
    that is not known.
    """
    if path.is_dir():
        return _of_folder(path)
    found, left = _records(path)
    return merged(found), left


def _of_folder(path: Path) -> tuple[list[KernelCounters], list[str]]:
    files = [one for one in sorted(path.rglob("*")) if one.suffix in SUFFIXES and one.is_file()]
    found, left = list[DispatchRecord](), list[str]()
    for file in files:
        try:
            more, skipped = _records(file)
        except AccelpatchError as error:
            left.append(str(error))
            continue
        found, left = found + more, left + skipped
    if not found:
        said = "; ".join(left) or f"none of its files ends in {', '.join(SUFFIXES)}"
        raise AccelpatchError(f"{path} holds no results that can be read: {said}")
    return merged(found), left


def _records(path: Path) -> tuple[list[DispatchRecord], list[str]]:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise AccelpatchError(f"{path} cannot be read: {error.strerror}") from error
    if size > MOST_BYTES:
        raise AccelpatchError(f"{path} has {size >> 30} GiB, more than the {MOST_BYTES >> 30} that are read")
    if path.suffix == ".db":
        return rocpd.read(path), []
    if path.suffix == ".csv":
        return counter_csv.read(path)
    if path.suffix in (".pftrace", ".perfetto-trace"):
        return perfetto.read(path)
    if path.suffix == ".json":
        kernels = trace.kernels(trace.complete(trace.read(path)), {})
        if not kernels:
            raise AccelpatchError(f"{path} is a trace without kernels of a GPU")
        return [DispatchRecord(one.name, one.end - one.start) for one in kernels], []
    raise AccelpatchError(f"{path} is no result of a profiler: give a {', '.join(SUFFIXES)} file, or a folder of them")


def merged(records: Iterable[DispatchRecord]) -> list[KernelCounters]:
    """One KernelCounters a kernel. A run may stand in several records, one a counter, as in a CSV of counters."""
    groups: dict[str, list[DispatchRecord]] = {}
    for one in records:
        groups.setdefault(one.kernel, []).append(one)
    made = [_merged(name, group) for name, group in groups.items()]
    return sorted(made, key=lambda one: (-one.microseconds, one.kernel))


def _merged(name: str, group: list[DispatchRecord]) -> KernelCounters:
    runs: dict[str, float] = {}
    values: dict[str, list[float]] = {}
    resources: dict[str, float] = {}
    for place, one in enumerate(group):
        run = one.run or f"number {place}"
        runs[run] = max(runs.get(run, 0.0), one.microseconds)
        for counter, value in one.counters.items():
            values.setdefault(counter, []).append(value)
        resources |= one.resources
    means = {counter: sum(found) / len(found) for counter, found in values.items()}
    return KernelCounters(name, len(runs), sum(runs.values()), means, resources)


def text(found: list[KernelCounters], most: int = 40) -> str:
    """A table of kernels, with their counters below each other."""
    total = sum(one.microseconds for one in found) or 1.0
    rows: list[tuple[str, ...]] = [("kernel", "runs", "us", "share", "resources")]
    for one in found[:most]:
        resource_text = ", ".join(f"{name} {value:g}" for name, value in one.resources.items())
        name, share = plain(one.kernel), f"{one.microseconds / total:.1%}"
        rows.append((name, str(one.runs), f"{one.microseconds:,.1f}", share, resource_text))
    lines = [table(rows)]
    if len(found) > most:
        lines.append(f"and {len(found) - most} kernels that took less; --json lists all")
    names = list(dict.fromkeys(name for one in found[:most] for name in one.counters))
    if names:
        head: list[tuple[str, ...]] = [("mean of a run", *(plain(one.kernel, 24) for one in found[:6]))]
        cells = [(plain(name), *(_value(one.counters.get(name)) for one in found[:6])) for name in names]
        lines += ["", table(head + cells)]
    return "\n".join(lines)


def _value(number: float | None) -> str:
    return "" if number is None else f"{number:,.2f}".rstrip("0").rstrip(".")


def plain(name: str, most: int = 70) -> str:
    """A name from a file without what a terminal would act on, and not too long."""
    shown = "".join(one if one.isprintable() else "?" for one in name)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
