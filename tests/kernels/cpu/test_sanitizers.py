"""Random shapes on every path, a thousand in all, under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library

FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
HARNESS = Path(__file__).with_name("harness.cpp")
SOURCES = Path(native_library.__file__).parent
reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}"),
]


def compiled(folder: Path, flags: tuple[str, ...]) -> Path:
    made = libraries.target("cpu", probe("cpu"))
    compiler = libraries.compiler(made)
    assert compiler is not None
    sources = [(SOURCES / name, own) for name, own in made.sources.items()] + [(HARNESS, ())]
    objects = [folder / f"{path.stem}.o" for path, _ in sources]

    def one(source: tuple[Path, tuple[str, ...]], out: Path) -> None:
        command = [compiler, *made.flags, *flags, f"-I{SOURCES}", *source[1], "-c", str(source[0]), "-o", str(out)]
        subprocess.run(command, check=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, sources, objects))
    program = folder / "harness"
    subprocess.run([compiler, *flags, "-pthread", *map(str, objects), "-o", str(program)], check=True, timeout=300)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    empty = tmp_path_factory.mktemp("empty")
    (empty / "empty.cpp").write_text("int main() {}\n")
    command = [
        str(libraries.compiler(libraries.target("cpu", probe("cpu")))),
        *FLAGS,
        str(empty / "empty.cpp"),
        "-o",
        str(empty / "empty"),
    ]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this compiler comes without the sanitizers' libraries")
    return compiled(tmp_path_factory.mktemp("sanitized"), FLAGS)


@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("isa", native_library.ISAS)
def test_random_shapes(program: Path, isa: str, rounds: int) -> None:
    index = native_library.ISAS.index(isa)
    if isa not in native_library.isas():
        pytest.skip(f"this machine has no {isa}")
    options = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(program), str(index), str(rounds), str(index)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **options}, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{rounds}\n"), done.stderr[-4000:]
