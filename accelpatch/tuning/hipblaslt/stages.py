"""The stages of a tuning, in order. Each reads what the one before wrote into the folder, and can be run alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

from . import balancer, configuration, job, logic, logs, platforms, results, search, workload
from .work import SUMMARY, Work, digest, write

JOB = (sys.executable, "-m", "accelpatch.tuning.hipblaslt.job")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Configured:
    """The result of `configs`. log: None where the stage had been run before."""

    rows: Sequence[workload.Row]
    log: logs.Log | None

    @property
    def names(self) -> list[str]:
        """The names of the configurations."""
        return [row.name for row in self.rows if row.name]


def configs(work: Work, log: Path, *, arch: str, platform: str, threshold: float) -> Configured:
    """Read a log and write summary.csv, and a configuration and a script for each GEMM that is worth tuning.

    arch: of AMD; the triton platform takes any. threshold: in percent of all flops. Raises AccelpatchError for a log
    without a usable GEMM, and for a folder that holds another tuning.
    """
    source = _source(platform)
    if not log.is_file():
        raise AccelpatchError(f"the log {log} is not here: {logs.RECORD}")
    settings = {"log": digest(log), "arch": arch, "platform": platform, "threshold": threshold}
    if work.begin(settings):
        return Configured(workload.read(work.summary), None)
    found = logs.read(log)
    rows = workload.weigh(found.found, threshold, lambda gemm: source.why_not(gemm, arch))
    chosen = [row for row in rows if row.name]
    if not chosen:
        raise AccelpatchError(
            f"none of {len(rows)} GEMMs of {log} is tuned; the largest: {rows[0].gemm.shape}: {rows[0].left_out}"
        )
    tunings = work.part("tunings")
    for row in chosen:
        write(
            tunings / f"{row.name}.yaml", _heading(row, platform) + configuration.text(source.document(row.gemm, arch))
        )
        script = tunings / f"{row.name}.sh"
        write(script, SCRIPT.format(name=row.name))
        script.chmod(0o755)
    write(work.summary, workload.text(rows))
    work.finish("configs")
    return Configured(rows, found)


SCRIPT = """#!/bin/sh
# The search for {name} alone; further options of `accelpatch tune hipblaslt optimize` may follow.
cd "$(dirname "$0")/.." && exec accelpatch tune hipblaslt optimize . --only {name} "$@"
"""


def _heading(row: workload.Row, platform: str) -> str:
    said = " for the SIMULATED device" if platform == "simulated" else ""
    return f"# {row.name}: {row.gemm.shape}; {row.calls} calls, {row.share:.1%} of all flops{said}\n"


def _source(platform: str) -> Any:
    """What writes configurations for a platform."""
    if platform == "triton":
        from accelpatch.tuning.hipblaslt import triton_configuration

        return triton_configuration
    return configuration


def optimize(
    work: Work, *, devices: Sequence[str], trials: int, seconds: float, seed: int = 0, only: str | None = None,
    hipblaslt: str = "", progress: balancer.Progress | None = None,
) -> balancer.Spread:  # fmt: skip
    """Search for every configuration of the folder that has no result yet, spread over devices.

    seconds: the limit of one search. only: of one configuration alone. Raises AccelpatchError without the search's
    library, and where none has a result afterwards.
    """
    platform = str(work.settings()["platform"])
    search.check_installed()
    work.check_space()
    rows = {row.name: row for row in workload.read(work.summary) if row.name}
    if only is not None and only not in rows:
        raise AccelpatchError(f"there is no configuration {only[:40]!a}; there are: {', '.join(rows)}")
    ready = {name for name in rows if has_result(work, name)}
    open_jobs = {
        name: float(row.gemm.flops) for name, row in rows.items() if name not in ready and only in (None, name)
    }
    given = ["--folder", str(work.folder), "--platform", platform, "--trials", str(trials), "--seed", str(seed)]
    given += ["--hipblaslt", hipblaslt] if hipblaslt else []

    def command(name: str, device: str) -> list[str]:
        return [*JOB, *given, "--name", name, "--device", device if platform == "hipblaslt" else "0"]

    environment = None if platform == "simulated" else seen_by
    made = balancer.spread(
        open_jobs, devices, command, work.part("logs"), seconds=seconds, progress=progress, environment=environment
    )
    if not ready and not made.done:
        why = "; ".join(f"{name}: {reason}" for part in (made.lost, made.failed) for name, reason in part.items())
        raise AccelpatchError(f"no search ended well ({why:.400}); {work.folder / 'logs'} says more")
    if made.done:
        work.reopen("optimize")
    if only is None and not made.left and not made.failed:
        work.finish("optimize")
    return made


def seen_by(device: str) -> Mapping[str, str]:
    """The environment of a child process that sees only one of this process's devices."""
    found = dict(os.environ)
    shown = (found.get("HIP_VISIBLE_DEVICES") or found.get("CUDA_VISIBLE_DEVICES") or "").split(",")
    one = shown[int(device)].strip() if int(device) < len(shown) and shown != [""] else device
    return {**found, **dict.fromkeys(VISIBLE, one)}


def has_result(work: Work, name: str) -> bool:
    """Whether a configuration's search has ended with a result that can be read."""
    try:
        return bool(json.loads((work.build(name) / job.RESULT).read_text(encoding="utf-8"))["us"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def merge(work: Work, *, hipblaslt: str = "") -> logic.Merged:
    """Put the solutions of all searches into one library logic a problem type, in `libs`, and build it.

    Raises AccelpatchError where there is none, or it cannot be built.
    """
    platform = platforms.make(str(work.settings()["platform"]), hipblaslt=hipblaslt)
    work.check_space()
    names = [row.name for row in workload.read(work.summary) if row.name and has_result(work, row.name)]
    files = [file for name in names for file in sorted((work.build(name) / platforms.LOGIC).glob("*.yaml"))]
    merged = logic.merge(files)
    if not merged.of:
        why = next(iter(merged.left_out.values()), f"no search in {work.folder} has a result")
        raise AccelpatchError(
            f"there is nothing to merge ({why}): run `accelpatch tune hipblaslt optimize {work.folder}`"
        )
    shutil.rmtree(work.folder / "benchmarks", ignore_errors=True)  # they were measured with the libraries before
    _write_libraries(work, "libs", merged.of)
    platform.build(work)
    work.finish("merge")
    return merged


def _write_libraries(work: Work, part: str, of: Sequence[logic.Logic]) -> None:
    """Write these files into a folder, and remove all others."""
    folder = work.folder / part
    shutil.rmtree(folder, ignore_errors=True)
    for one in of:
        write(work.part(part) / one.name, logic.as_text(one))


def benchmark(work: Work, *, hipblaslt: str = "", device: str = "0") -> list[results.Compared]:
    """Run each GEMM of the merged library with the reference and with the tuned library, and check its results."""
    platform = platforms.make(str(work.settings()["platform"]), device=device, hipblaslt=hipblaslt)
    work.check_space()
    files = sorted((work.folder / "libs").glob("*.yaml"))
    if not files:
        raise AccelpatchError(
            f"{work.folder / 'libs'} holds no library: run `accelpatch tune hipblaslt merge {work.folder}`"
        )
    rows, folder = [row for row in workload.read(work.summary) if row.name], work.part("benchmarks")
    for file in files:
        served = {size for size, _, _ in logic.read(file).sizes()}
        wanted = [row for row in rows if platforms.size_of(row.gemm) in served and results.serves(file, row.gemm)]
        for which in results.RUNS:
            out = folder / f"{file.stem}-{which}.out"
            if not results.is_complete(out, wanted):
                platform.bench(work, file, wanted, which, out)
    work.finish("benchmark")
    return results.compare(work)


def postprocess(work: Work, *, error: float, uplift: float) -> results.Summary:
    """Drop solutions that are wrong or not faster; write the tables of results and the final library."""
    if not (work.folder / SUMMARY).exists():
        work.settings()
    found = results.summarise(results.compare(work), error=error, uplift=uplift)
    folder = work.part("results")
    write(folder / "raw_results.csv", results.text(found.compared))
    write(folder / "final_results.csv", results.text([one for one in found.compared if one.winner == "tuned"]))
    kept = []
    for file in sorted((work.folder / "libs").glob("*.yaml")):
        one = logic.read(file)
        better = {platforms.size_of(each.row.gemm) for each in found.compared
                  if each.winner == "tuned" and each.library == file.stem}  # fmt: skip
        if one.keep(better.__contains__):
            kept.append(one)
    _write_libraries(work, "final", kept)
    work.part("final")
    work.finish("postprocess")
    return found


def adoption(work: Work, hipblaslt: str) -> list[str]:
    """The commands that change hipBLASLt itself by the final library, for the user to run; none of a platform that is
    not hipBLASLt, or where nothing is better."""
    settings = work.settings()
    if settings["platform"] != "hipblaslt" or not any((work.folder / "final").glob("*.yaml")):
        return []
    root, arch = Path(hipblaslt or "/path/to/rocm-libraries/projects/hipblaslt"), str(settings["arch"])
    equality = root / "library/src/amd_detail/rocblaslt/src/Tensile/Logic/asm_full" / arch / "Equality"
    tool, final = root / "tensilelite/Tensile/bin/TensileMergeLibrary", (work.folder / "final").absolute()
    words = [tool, "--no_eff", "--force_merge", "True", equality, final, equality]
    return [shlex.join(map(str, words)), shlex.join(["cd", str(root)]), shlex.join(["./install.sh", "-dc", "-a", arch])]
