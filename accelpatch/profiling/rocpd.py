"""Reads rocprofv3's rocpd database by its views `kernels`, and `kernel_pmc_events` or `counters_collection`.

The tables behind the views carry an identifier in their names and differ from version to version; the views are what
rocprofiler-sdk documents for queries. A database is opened to be read only, its own functions are not trusted, and a
query that takes too long is ended.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from accelpatch.errors import AccelpatchError
from accelpatch.profiling.dispatch_record import DispatchRecord

SECONDS = 60.0
MOST_ROWS = 5_000_000
RESOURCES = {
    "vector registers": ("arch_vgpr_count", "vgpr_count"), "accumulators": ("accum_vgpr_count",),
    "scalar registers": ("sgpr_count",), "shared": ("lds_size", "lds_block_size"), "scratch": ("scratch_size",),
    "threads": ("workgroup_x", "workgroup_size"),
}  # fmt: skip
COUNTERS = ("kernel_pmc_events", "counters_collection")
NAME, COUNTER, VALUE = ("name", "kernel_name"), ("pmc_name", "counter_name"), ("pmc_value", "counter_value", "value")


def read(path: Path) -> list[DispatchRecord]:
    """The runs of kernels in a database, and their counters. Raises AccelpatchError for one that is cut off, that is no
    database, or whose views are others."""
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise AccelpatchError(f"{path} is still being written, as {log.name} beside it says: let the program end first")
    until = time.monotonic() + SECONDS
    try:
        address = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as base:
            base.execute("PRAGMA trusted_schema = OFF")
            base.set_progress_handler(lambda: int(time.monotonic() > until), 100_000)
            return _read(base, path)
    except sqlite3.Error as error:
        raise AccelpatchError(
            f"{path} cannot be read as a rocpd database ({error}): it is cut off, or of another version; `rocpd "
            "convert` of the ROCm that wrote it makes CSVs, which can be read too"
        ) from error


def _read(base: sqlite3.Connection, path: Path) -> list[DispatchRecord]:
    views = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type IN ('view', 'table')")}
    if "kernels" not in views:
        raise AccelpatchError(
            f"{path} has no view `kernels`, which rocpd databases of version 3 have: it is of another version, or of "
            "another program; `rocpd convert` of the ROCm that wrote it makes CSVs, which can be read too"
        )
    found = _rows(base, path, "kernels", counters=False)
    for view in COUNTERS:
        if view in views:
            return found + _rows(base, path, view, counters=True)
    return found


def _rows(base: sqlite3.Connection, path: Path, view: str, counters: bool) -> list[DispatchRecord]:
    cursor = base.execute(f"SELECT * FROM {view} LIMIT {MOST_ROWS}")  # a name of ours
    columns = {name: place for place, (name, *_) in enumerate(cursor.description)}

    def place(names: Sequence[str]) -> int | None:
        return next((columns[name] for name in names if name in columns), None)

    name, counter, value = place(NAME), place(COUNTER), place(VALUE)
    if name is None or (counters and (counter is None or value is None)):
        raise AccelpatchError(
            f"{path}: its view `{view}` has the columns {', '.join(columns)}, which are not known here"
        )
    run = place(("dispatch_id", "id"))
    duration, start, end = (place((one,)) for one in ("duration", "start", "end"))
    places = {label: found for label, names in RESOURCES.items() if (found := place(names)) is not None}
    made = []
    for row in cursor:
        if counters:
            assert counter is not None
            assert value is not None
            made.append(
                DispatchRecord(str(row[name]), 0.0, {str(row[counter]): _number(row[value])}, run=_run(row, run))
            )
            continue
        spent = _number(row[duration]) if duration is not None else 0.0
        if duration is None and start is not None and end is not None:
            spent = _number(row[end]) - _number(row[start])
        resources = {label: _number(row[at]) for label, at in places.items()}
        made.append(DispatchRecord(str(row[name]), spent / 1e3, {}, resources, _run(row, run)))
    return made


def _run(row: Sequence[Any], place: int | None) -> str:
    return "" if place is None else str(row[place])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
