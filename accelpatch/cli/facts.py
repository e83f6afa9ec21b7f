"""Facts about the installation for ``doctor``: each function returns within ``TIMEOUT`` seconds and never raises.

Queries that could hang or crash (a driver, a broken torch) run in a separate process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelpatch import device
from accelpatch.errors import AccelpatchError

TIMEOUT = 8.0  # seconds
MARK = "accelpatch-facts:"  # prefix of our line: drivers print to stdout too


def ask(command: list[str], seconds: float) -> tuple[int, str, str] | None:
    """Run a program: its exit status, stdout and stderr, or None where it does not end within ``seconds``.

    After a timeout it gets SIGKILL but is not waited for (subprocess.run would wait): a stuck driver can hold it.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, errors="replace", **streams)  # type: ignore[call-overload]
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return process.returncode, out, error


def version(package: str) -> str | None:
    """A package's installed version, or None. Reads metadata only: importing some packages takes seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # not installed but on sys.path, or ROCm's Triton, whose distribution has another name than its module
        return "of unknown version" if importlib.util.find_spec(package) else None


def compiler(name: str) -> str | None:
    """The path of the compiler that builds would use, with the line of ``--version`` that has its version; or None."""
    path = device.compilers()[name]
    if path is None:
        return None
    try:
        answer = ask([path, "--version"], TIMEOUT / 2)
    except OSError as error:
        return f"{path}, which does not start: {error}"
    if answer is None:
        return f"{path}, which does not answer"
    lines = [line.strip() for line in answer[1].splitlines() if any(c.isdigit() for c in line)]
    # nvcc's copyright comes before its release
    named = next((line for line in lines if "release" in line), lines[0] if lines else f"status {answer[0]}")
    package = " (of the Python package nvidia-cuda-nvcc)" if str(Path(path).parent) in device.packaged() else ""
    return f"{path}{package}: {named}"


def cache_facts() -> dict[str, Any]:
    """The cache's folder, number of entries and bytes; or {"problem": message}."""
    from accelpatch import cache

    try:
        entries = cache.listing()
        return {"root": str(cache.root()), "entries": len(entries), "bytes": sum(entry.bytes for entry in entries)}
    except (AccelpatchError, OSError) as error:
        return {"problem": str(error)}


def torch_facts() -> dict[str, Any]:
    """torch's version, build, threads and devices, and where the CPU kernels come from; or {"problem": message}."""
    try:
        answer = ask([sys.executable, "-m", "accelpatch.cli.facts"], TIMEOUT)
    except OSError as error:
        return {"problem": str(error)}
    if answer is None:
        return {"problem": f"importing torch and listing its devices took over {TIMEOUT:.0f} s; is a driver stuck?"}
    status, out, error_text = answer
    for line in out.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    return {"problem": (error_text.strip().splitlines() or [f"status {status}"])[-1]}


def _ask_torch() -> dict[str, Any]:
    import torch

    from accelpatch.device import probe
    from accelpatch.kernels.compiling import libraries

    try:
        kernels = libraries.source_of("cpu", probe("cpu"))
    except AccelpatchError as error:
        kernels = f"none: {error}"
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    devices = [(name, probe(name)) for name in names]
    build = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU build"
    )
    return {
        "version": torch.__version__,
        "build": build,
        "threads": torch.get_num_threads(),
        "cpu_kernels": kernels,
        "devices": [
            {"torch_device": name, "name": d.name, "vendor": d.vendor, "arch": d.arch, "memory": d.memory}
            for name, d in devices
        ],
    }


if __name__ == "__main__":
    print(MARK + json.dumps(_ask_torch()))
