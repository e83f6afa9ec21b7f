"""Builds wheels with the CPU kernels in them, for x86-64 and 64-bit ARM, on either: `make wheel`.

    python scripts/build_wheel.py --wheels DIR [--arch x86_64 aarch64] [--out dist]

DIR holds the unpacked `ziglang` wheel, whose clang compiles for both, against the glibc of manylinux_2_28 and with its
C++ library linked in. `auditwheel` (where DIR has it, as after `make wheel`) then confirms that each wheel runs
wherever its tag says.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from accelpatch.device import probe  # noqa: E402
from accelpatch.kernels.compiling import libraries  # noqa: E402
from hatch_build import GLIBC, VARIABLE  # noqa: E402

ARCHS = ("x86_64", "aarch64")
# An option of g++ and clang++ that zig spells in its own way.
OTHERWISE = """for word; do
    shift
    case $word in -march=armv8.2-a+dotprod) word=-mcpu=generic+dotprod;; esac
    set -- "$@" "$word"
done
"""


def compiler(wheels: Path, arch: str) -> Path:
    """A program in `wheels` that takes a C++ compiler's options and compiles for `arch`; links leave symbols out."""
    zig = next(iter(sorted(wheels.glob("**/ziglang/__main__.py"))), None)
    if zig is None:
        sys.exit(f"there is no ziglang below {wheels}: `make wheel` and `make gate` install it")
    command = [sys.executable, "-m", "ziglang", "c++", "-target", f"{arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"]
    paths = {"PYTHONPATH": zig.parents[1], "ZIG_GLOBAL_CACHE_DIR": wheels.resolve() / "zig-cache"}
    exports = "".join(f"export {name}='{Path(value).resolve()}'\n" for name, value in paths.items())
    program = wheels / f"c++-{arch}"
    program.write_text(f'#!/bin/sh\n{exports}{OTHERWISE}exec {" ".join(command)} -Wl,-s "$@"\n')
    program.chmod(0o755)
    return program


def compiled(wheels: Path, arch: str, folder: Path) -> Path:
    """The CPU library for `arch`, with its manifest, in a subfolder of `folder`."""
    with mock.patch.object(platform, "machine", return_value=arch):  # whose target is asked for
        made = libraries.target("cpu", probe("cpu"))
    into = libraries.place(folder, "cpu", made)
    into.mkdir(parents=True)
    libraries.compile_into(into, made, str(compiler(wheels, arch)))
    return into


def wheel(folder: Path, out: Path) -> Path:
    """The wheel with the library of `folder`, in `out`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    with tempfile.TemporaryDirectory() as made:
        settings = os.environ | {VARIABLE: str(folder)}
        subprocess.run([*command, "--wheel-dir", made], check=True, env=settings)
        [file] = Path(made).iterdir()
        out.mkdir(parents=True, exist_ok=True)
        (out / file.name).write_bytes(file.read_bytes())
        return out / file.name


def audited(wheels: Path, file: Path) -> str:
    """The oldest platform that auditwheel finds a wheel fit for. Exits where its tag promises more."""
    command = [sys.executable, "-m", "auditwheel", "show", str(file)]
    paths = os.pathsep.join(filter(None, (str(wheels), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
    found = re.search(r"following\s+platform\s+tag:\s+\"manylinux_(\d+)_(\d+)_(\w+)\"", done.stdout)
    if done.returncode or not found or (int(found[1]), int(found[2])) > GLIBC or not file.stem.endswith(found[3]):
        sys.exit(f"auditwheel does not confirm {file.name}:\n{done.stdout}{done.stderr}")
    return found[0].replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="Folder with the unpacked wheels of the tools.")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS, help="The machines; both where left out.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="Folder for the wheels.")
    given = parser.parse_args()
    for arch in given.arch:
        with tempfile.TemporaryDirectory() as folder:
            library = compiled(given.wheels, arch, Path(folder)) / libraries.LIBRARY
            size = library.stat().st_size
            file = wheel(Path(folder), given.out)
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, its kernels {size / 1e6:.1f} MB", flush=True)
        if any(given.wheels.glob("auditwheel/__main__.py")):
            print(audited(given.wheels, file))


if __name__ == "__main__":
    main()
