"""Reads CSVs of rocprofv3 (kernel_trace, counter_collection), rocprof-compute (pmc_perf), rocprof (results) and ncu."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelpatch.errors import AccelpatchError
from accelpatch.profiling.dispatch_record import DispatchRecord

#: what a resource is called here -> its columns in the formats
RESOURCES = {
    "vector registers": ("VGPR_Count", "arch_vgpr", "vgpr", "Arch_VGPR"),
    "accumulators": ("Accum_VGPR_Count", "accum_vgpr", "Accum_VGPR"),
    "scalar registers": ("SGPR_Count", "sgpr", "SGPR"),
    "shared": ("LDS_Block_Size", "Group_Segment_Size", "lds", "LDS_Per_Workgroup"),
    "scratch": ("Scratch_Size", "Private_Segment_Size", "scr", "Scratch_Per_Workitem"),
    "threads": ("Workgroup_Size", "Workgroup_Size_X", "wgr"),
}
#: columns of rocprof's results.csv that are no counters
ROCPROF = frozenset((
    "Index", "KernelName", "gpu-id", "queue-id", "queue-index", "pid", "tid", "grd", "wgr", "lds", "scr", "arch_vgpr",
    "accum_vgpr", "vgpr", "sgpr", "wave_size", "sig", "obj", "DispatchNs", "BeginNs", "EndNs", "CompleteNs",
    "DurationNs",
))  # fmt: skip
#: columns of rocprof-compute's pmc_perf.csv that are no counters; all others are
COMPUTE = frozenset((
    "Dispatch_ID", "GPU_ID", "Queue_ID", "PID", "TID", "Grid_Size", "Workgroup_Size", "LDS_Per_Workgroup",
    "Scratch_Per_Workitem", "Arch_VGPR", "Accum_VGPR", "SGPR", "Wave_Size", "Kernel_Name", "Start_Timestamp",
    "End_Timestamp", "Correlation_ID", "Kernel_ID", "Node",
))  # fmt: skip
NCU_TIMES = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}
DURATION = ("gpu__time_duration.sum", "Duration")
MOST_FIELD = 1 << 20


def read(path: Path) -> tuple[list[DispatchRecord], list[str]]:
    """The runs in a CSV, and what was left out: lines cut off. Raises AccelpatchError for another file."""
    csv.field_size_limit(MOST_FIELD)
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = csv.reader(line.replace("\0", "") for line in file)
            header = next((line for line in lines if _is_header(line)), None)
            if header is None:
                raise AccelpatchError(
                    f"{path} has no line of columns of rocprofv3, rocprof or ncu (with Kernel_Name, KernelName or "
                    "Kernel Name): it is cut off, or of another program"
                )
            return _read(path, header, lines)
    except (csv.Error, OSError) as error:
        raise AccelpatchError(f"{path} cannot be read: {error}") from error


def _is_header(line: Sequence[str]) -> bool:
    return bool({"Kernel_Name", "KernelName", "Kernel Name"} & set(line))


def _read(path: Path, header: Sequence[str], lines: Iterator[list[str]]) -> tuple[list[DispatchRecord], list[str]]:
    form = _rocprofv3 if "Kernel_Name" in header else _rocprof if "KernelName" in header else _ncu
    rows, bad = list[dict[str, str]](), 0
    for line in lines:
        if len(line) == len(header):
            rows.append(dict(zip(header, line, strict=True)))
        elif line:
            bad += 1
    found = list[DispatchRecord]()
    units = rows.pop(0) if form is _ncu and rows and not rows[0].get("ID") else {}
    for row in rows:
        try:
            found.append(form(row, units))
        except (ValueError, KeyError):
            bad += 1
    left = [f"{path}: {bad} lines, which are cut off or of another form"] if bad else []
    return found, left


def _rocprofv3(row: Mapping[str, str], units: Mapping[str, str]) -> DispatchRecord:
    """A line of kernel_trace.csv, of counter_collection.csv, where it is one counter of a run, or of rocprof-compute's
    pmc_perf.csv, which has a column for each counter."""
    spent = (float(row["End_Timestamp"]) - float(row["Start_Timestamp"])) / 1e3
    counters = {row["Counter_Name"]: float(row["Counter_Value"])} if "Counter_Name" in row else {}
    if "Arch_VGPR" in row:
        counters = {name: float(value) for name, value in row.items() if name not in COMPUTE and _is_number(value)}
    run = row.get("Dispatch_Id", row.get("Dispatch_ID", ""))
    return DispatchRecord(row["Kernel_Name"], spent, counters, _resources(row), run)


def _rocprof(row: Mapping[str, str], units: Mapping[str, str]) -> DispatchRecord:
    begin, end = row.get("BeginNs"), row.get("EndNs")
    spent = float(row["DurationNs"]) if "DurationNs" in row else float(end or 0) - float(begin or 0)
    counters = {name: float(value) for name, value in row.items() if name not in ROCPROF and _is_number(value)}
    return DispatchRecord(row["KernelName"], spent / 1e3, counters, _resources(row), row.get("Index", ""))


def _ncu(row: Mapping[str, str], units: Mapping[str, str]) -> DispatchRecord:
    """A line of the page details (one metric), or of the page raw (all metrics; a line of units comes first)."""
    if "Metric Name" in row:
        name, unit, value = row["Metric Name"], row.get("Metric Unit", ""), row["Metric Value"]
        found = {name: _float(value)} if _is_number(value) else {}
        spent = found[name] * NCU_TIMES.get(unit, 0.0) if name in DURATION and name in found else 0.0
        return DispatchRecord(row["Kernel Name"], spent, found, {}, row["ID"])
    counters = {name: _float(value) for name, value in row.items() if "__" in name and _is_number(value)}
    spent = counters.get(DURATION[0], 0.0) * NCU_TIMES.get(units.get(DURATION[0], ""), 0.0)
    columns = {
        "vector registers": "launch__registers_per_thread", "shared": "launch__shared_mem_per_block",
        "threads": "launch__block_size",
    }  # fmt: skip
    resources = {label: counters[name] for label, name in columns.items() if name in counters}
    return DispatchRecord(row["Kernel Name"], spent, counters, resources, row["ID"])


def _resources(row: Mapping[str, str]) -> dict[str, float]:
    return {
        label: float(row[name]) for label, names in RESOURCES.items() for name in names if _is_number(row.get(name, ""))
    }  # fmt: skip


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def _is_number(text: str) -> bool:
    try:
        _float(text)
    except ValueError:
        return False
    return True
