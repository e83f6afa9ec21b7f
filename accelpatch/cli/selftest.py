"""``accelpatch selftest``: compare every kernel that this machine can run with its plain torch reference."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from . import console, options
from .options import DeviceOption, JsonOption, PluginOption


def selftest(
    device: DeviceOption = "auto",
    plugin: PluginOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="A line for each operation, and the reasons of those not run.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare every kernel that this machine can run with its plain torch reference; exit status 1 if one is wrong."""
    where = options.torch_device(device)
    options.load_plugins(plugin)
    from accelpatch import api

    records = api.selftest(where)
    failed = [record for record in records if record.ok is False]
    if json:
        console.print_json([record.to_dict() for record in records])
    else:
        (_print_all if verbose else _print_summary)(records)
        _print_end(records, failed)
    if failed:
        raise typer.Exit(1)


def _print_summary(records: list[Any]) -> None:
    """A line for each implementation that runs here, and one for all that do not."""
    from accelpatch.report import table

    outcomes: dict[str, Counter[bool | None]] = {}
    operations: dict[str, set[str]] = {}
    for record in records:
        outcomes.setdefault(record.implementation, Counter())[record.ok] += 1
        operations.setdefault(record.implementation, set()).add(record.op)
    ran = {name: count for name, count in outcomes.items() if count[True] or count[False]}
    rows = [("implementation", "operations", "right", "wrong", "not run here")]
    for name, count in sorted(ran.items(), key=lambda item: -item[1][True]):
        rows.append((name, str(len(operations[name])), str(count[True]), str(count[False]), str(count[None])))
    print(table(rows))
    idle = [f"{name} ({len(operations[name])})" for name in outcomes if name not in ran]
    if idle:
        print(f"not run here at all, with their operations: {', '.join(idle)}; --verbose says why")


def _print_all(records: list[Any]) -> None:
    from accelpatch.report import table

    outcomes: dict[tuple[str, str], Counter[bool | None]] = {}
    for record in records:
        outcomes.setdefault((record.op, record.implementation), Counter())[record.ok] += 1
    rows = [("operation", "implementation", "right", "wrong", "not run here")]
    rows += [(*key, str(count[True]), str(count[False]), str(count[None])) for key, count in outcomes.items()]
    print(table(rows))
    for reason, count in Counter(f"{r.op} by {r.implementation}: {r.reason}" for r in records if r.ok is None).items():
        print(f"not run here, {count} cases: {reason}")


def _print_end(records: list[Any], failed: list[Any]) -> None:
    """Every failure in full, then the count."""
    for record in failed:
        print(
            f"WRONG {record.op} by {record.implementation}, {record.case}: error {record.error:.3e}, "
            f"allowed {record.bound:.3e} {record.reason}"
        )
    ran = sum(record.ok is not None for record in records)
    print(f"{ran} cases ran, {len(failed)} wrong")
