"""Runs compilers: all sources of a library side by side, then the linker."""

from __future__ import annotations

import functools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accelpatch.errors import KernelError
from accelpatch.kernels.compiling.targets import Target

SECONDS = 600  # time limit of one compiler run; each source takes less than a tenth of it
LINES = 20  # of a failing compiler's output that the error shows


@functools.cache
def identity(path: str) -> str:
    """The compiler's resolved path and version text."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the compiler {path} does not start ({error}): name another") from error
    return f"{os.path.realpath(path)}\n{said}"


def compile_and_link(made: Target, path: str, finished: Path) -> None:
    """Compile all sources in parallel and link them to `finished`. Raises KernelError with a compiler's last lines."""
    advice = (
        f"mend or update the compiler, name another in {made.variable}, or do without: torch's own operations are used"
        " then"
    )
    objects = {source: finished.with_name(f"{source.replace('/', '-')}.o") for source in made.sources}
    commands = [
        [path, *made.flags, *including(made), *flags, "-c", str(made.home / source), "-o", str(objects[source])]
        for source, flags in made.sources.items()
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(lambda command: run(command, advice), commands))
    run([path, *made.link, *map(str, objects.values()), "-o", str(finished)], advice)
    for file in objects.values():
        file.unlink()


def including(made: Target) -> list[str]:
    """The flags for the folders of headers: the sources' own, and one of others, whose warnings are not ours."""
    return [f"-I{made.home}", *(("-isystem", made.include) if made.include else ())]


def run(command: list[str], advice: str, first: bool = False) -> None:
    """Run a compiler. Raises KernelError with the last lines of its output (`first`: the first), and an advice."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{command[0]} did not run ({error}): {advice}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        said = "\n".join(lines[:LINES] if first else lines[-LINES:])
        raise KernelError(f"{' '.join(command)} failed with status {done.returncode}:\n{said}\n{advice}")
