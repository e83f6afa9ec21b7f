"""The output of ``accelpatch tune hipblaslt``: notes on stderr, results on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console

if TYPE_CHECKING:
    from accelpatch.tuning.hipblaslt import balancer, logic, results, stages


def configured(found: stages.Configured, out: Path, platform: str) -> dict[str, Any]:
    """Print what `configs` found on stderr, and return it as a JSON document."""
    log, left_out = found.log, [row for row in found.rows if not row.name]
    if log is None:
        console.note(f"configs: already done in {out}: {len(found.names)} GEMMs")
    else:
        console.note(f"configs: {len(found.names)} of {len(found.rows)} GEMMs of {log.form}, {log.found.lines} lines")
        for number, why in log.skipped:
            console.warning(f"line {number} is left out: {why}")
        if log.unusable > len(log.skipped):
            console.warning(f"{log.unusable - len(log.skipped)} more lines are left out")
        for note in log.notes:
            console.warning(note)
    for why in dict.fromkeys(row.left_out for row in left_out):
        count = sum(row.left_out == why for row in left_out)
        console.note(f"configs: {count} GEMM{'s are' if count > 1 else ' is'} not tuned: {why}")
    if platform == "simulated":
        console.note("configs: for a SIMULATED device, by a cost model: no time below is a measurement")
    rows = [{"name": row.name, "shape": row.gemm.shape, "calls": row.calls, "share": row.share} for row in found.rows]
    return {"platform": platform, "out": str(out), "gemms": rows, "unusable_lines": log.unusable if log else None}


def optimized(made: balancer.Spread, work: Path) -> None:
    console.note(f"optimize: {len(made.done)} searches ended; logs in {work / 'logs'}")
    for device, why in made.lost.items():
        console.warning(f"device {device} is given up: {why}")
    for name, why in made.failed.items():
        console.warning(f"{name}: {why}; the command again goes on where it was")
    for name in made.left:
        console.warning(f"{name} was not begun: no device is left")


def merged(made: logic.Merged, work: Path) -> None:
    for why in made.left_out.values():
        console.warning(why)
    console.note(f"merge: {len(made.of)} libraries in {work / 'libs'}")


def finish(found: results.Summary, work: Path, hipblaslt: str, json: bool) -> None:
    """Print the comparison, the uplift, and the commands that the user may run to adopt the result."""
    from accelpatch.report import table
    from accelpatch.tuning.hipblaslt import stages
    from accelpatch.tuning.hipblaslt.work import Work

    platform = str(Work(work).settings()["platform"])
    commands = stages.adoption(Work(work), hipblaslt)
    gemms = [{"name": one.row.name, "reference_us": one.reference.microseconds, "tuned_us": one.tuned.microseconds,
              "ratio": one.ratio, "error": one.error, "winner": one.winner, "reason": one.reason}
             for one in found.compared]  # fmt: skip
    if json:
        console.print_json({"platform": platform, "simulated": platform == "simulated", "average_uplift": found.mean,
                            "weighted_uplift": found.weighted, "gemms": gemms, "commands": commands})  # fmt: skip
        return
    label = "SIMULATED " if platform == "simulated" else ""
    rows = [("GEMM", "shape", "calls", f"{label}us, reference", f"{label}us, tuned", "x", "kept")]
    rows += [
        (one.row.name, one.row.gemm.shape, str(one.row.calls), f"{one.reference.microseconds:.2f}",
         f"{one.tuned.microseconds:.2f}", f"{one.ratio:.3f}", one.reason or "yes")
        for one in found.compared
    ]  # fmt: skip
    print(table(rows))
    mean = "none is kept" if found.mean is None else f"{found.mean:+.1%} over {len(found.kept)} GEMMs that are kept"
    print(f"{label}average uplift: {mean}")
    print(f"{label}weighted uplift: {found.weighted:+.1%} of the time of all calls of {len(found.compared)} GEMMs")
    print(f"tables: {work / 'results'}; final library: {work / 'final'}")
    if platform == "simulated":
        print("SIMULATED: the times are those of a cost model, and the library is none that hipBLASLt can use")
    if commands:
        print("these change hipBLASLt itself, so they are yours to run, on a branch of its own:")
        print("\n".join(f"  {line}" for line in commands))


def other_engine(engine: str, log: Path, hipblaslt: str, devices: Sequence[str], arch: str | None, json: bool) -> None:
    """Print the configuration lines or commands of another engine; none is run."""
    from accelpatch.tuning.hipblaslt import engines

    found = engines.lines(engine, log, hipblaslt, devices, arch)
    if json:
        console.print_json({"engine": engine, "lines": found.lines, "notes": found.notes})
        return
    for note in found.notes:
        console.note(note)
    print("\n".join(found.lines))
