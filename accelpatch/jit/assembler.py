"""Assembles text to a code object, by ROCm's clang if it is installed, otherwise by LLVM 19 or the ziglang wheel's
clang.

Code objects are cached in the user's cache folder; the key is a digest of all inputs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from accelpatch import cache
from accelpatch.errors import CacheError, CompileError

KIND = "jit"
_ROCM = Path("/opt/rocm/llvm/bin")
_OPTIONS = ("--target=amdgcn-amd-amdhsa", "-c", "-x", "assembler")
_LINK = ("-shared", "--no-undefined")


@dataclass(frozen=True)
class Tools:
    """The commands that assemble and link."""

    assemble: tuple[str, ...]
    link: tuple[str, ...]

    def version(self) -> str:
        """The assembler's version, for the cache's key."""
        done = subprocess.run([*self.assemble, "--version"], capture_output=True, text=True, check=False)
        return done.stdout.partition("\n")[0]


def tools(arch: str) -> Tools:
    """The tools of this machine for an arch. Raises CompileError where there are none."""
    if (_ROCM / "clang").exists():
        return Tools((str(_ROCM / "clang"),), (str(_ROCM / "ld.lld"),))
    if arch != "gfx950" and shutil.which("clang-19") and shutil.which("ld.lld-19"):
        return Tools(("clang-19",), ("ld.lld-19",))
    zig = _zig()
    if zig is not None:
        return Tools((str(zig), "clang"), (str(zig), "ld.lld"))
    raise CompileError(
        f"nothing here assembles for {arch}: install ROCm, or clang-19 and lld-19 (not for gfx950), or ziglang's wheel"
    )


def _zig() -> Path | None:
    """The compiler of the ziglang wheel, as a Python package or in the folder "gate" of this environment."""
    spec = util.find_spec("ziglang")
    folders = [Path(one) for one in (spec.submodule_search_locations or ()) if spec] if spec else []
    folders.append(Path(sys.prefix) / "gate" / "ziglang")
    return next((folder / "zig" for folder in folders if (folder / "zig").exists()), None)


def assembled(text: str, arch: str, chosen: Tools | None = None) -> bytes:
    """The code object of an assembly file. Raises CompileError with the Python line of each error."""
    found = chosen or tools(arch)
    with tempfile.TemporaryDirectory() as folder:
        source, made, linked = (Path(folder) / name for name in ("kernel.s", "kernel.o", "kernel.co"))
        source.write_text(text)
        done = subprocess.run(
            [*found.assemble, *_OPTIONS, f"-mcpu={arch}", str(source), "-o", str(made)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CompileError(_explained(done.stderr, text))
        subprocess.run([*found.link, *_LINK, str(made), "-o", str(linked)], check=True, capture_output=True)
        return linked.read_bytes()


def _explained(errors: str, text: str) -> str:
    """The assembler's errors, each preceded by the Python line of its instruction."""
    lines, found = text.splitlines(), []
    for number, message in re.findall(r"kernel\.s:(\d+):\d+: error: (.*)", errors):
        code, _, place = lines[int(number) - 1].partition("//")
        found.append(f"{place.strip() or f'line {number} of the assembly'}: {message}: {code.strip()}")
    return "\n".join(found) or errors


def code_object(text: str, arch: str, made_from: dict[str, Any]) -> bytes:
    """The code object from the cache; a missing one is assembled and cached. made_from: the kernel's source and
    compile-time arguments.

    Raises CacheError for an entry of the cache with other inputs, or with damaged code.
    """
    chosen = tools(arch)
    facts = {**made_from, "arch": arch, "tools": chosen.version(), "version": _version(),
             "assembly": _digest(text.encode())}  # fmt: skip
    key = _digest(json.dumps(facts, sort_keys=True).encode())

    def write(folder: Path) -> None:
        data = assembled(text, arch, chosen)
        (folder / "kernel.co").write_bytes(data)
        (folder / "kernel.json").write_text(json.dumps({**facts, "code": _digest(data)}, sort_keys=True))

    return _checked(cache.publish(KIND, key, write), facts)


def _checked(folder: Path, facts: dict[str, Any]) -> bytes:
    advice = f"remove it by `accelpatch cache clear`, or remove {folder}"
    try:
        data, stored = (folder / "kernel.co").read_bytes(), json.loads((folder / "kernel.json").read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"the cached kernel {folder} cannot be read ({error}): {advice}") from error
    if stored != {**facts, "code": stored.get("code")}:
        raise CacheError(f"the cached kernel {folder} was made from something else than this kernel: {advice}")
    if stored["code"] != _digest(data):
        raise CacheError(f"the cached kernel {folder} is not what was written there: {advice}")
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version() -> str:
    try:
        return metadata.version("accelpatch")
    except metadata.PackageNotFoundError:
        return "unknown"
