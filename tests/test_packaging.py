"""Installing: the environment's own torch stays, the recipes travel, and the two lists of requirements agree."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def pip(*arguments: str, find: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """pip with no index and no settings of this machine: it sees what is installed, and the files in ``find``."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-index", "--no-build-isolation", "--quiet"]
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(find), "PYTHONPATH": path}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **settings}
    )


@pytest.mark.parametrize(
    "version, kept",
    [("2.7.0+rocm6.3", True), ("2.7.1+cu126", True), ("2.13.0+cpu", True), ("2.6.0+rocm6.2", False)],
    ids=["rocm", "cuda", "cpu", "too_old"],
)
def test_torch_that_is_there_stays(tmp_path: Path, version: str, kept: bool) -> None:
    """With no index to turn to, a torch that does not satisfy the requirement makes pip fail instead of replace it."""
    facts = tmp_path / f"torch-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    done = pip(
        "install", "--dry-run", "--report", str(tmp_path / "report.json"), ".", find=tmp_path, path=str(tmp_path)
    )
    assert (done.returncode == 0) == kept, done.stderr
    if kept:
        installed = json.loads((tmp_path / "report.json").read_text())["install"]
        assert [item["metadata"]["name"] for item in installed] == ["accelpatch"]
    else:
        assert "No matching distribution found for torch>=2.7" in done.stderr


def test_wheel_carries_recipes_and_types(tmp_path: Path) -> None:
    done = pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), ".", find=tmp_path)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    recipes = {f"accelpatch/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert recipes
    assert recipes <= names
    assert {"accelpatch/py.typed", "accelpatch/cli/alice.txt"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "scripts/", "accelpatch/kernels/prebuilt/")) for name in names)


LOADED = """
import accelpatch
from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
print(libraries.source_of("cpu", probe("cpu")))
print(native_library.isa())
print(accelpatch.__file__)
"""


@pytest.mark.skipif(libraries.why_not("cpu", probe("cpu")) is not None, reason="needs a C++ compiler")
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library that is compiled here in place of the wheel's own, which scripts/wheel_gate.py runs."""
    arch, site = platform.machine(), tmp_path / "site"
    libraries.export("cpu", probe("cpu"), tmp_path / "kernels")
    monkeypatch.setenv("ACCELPATCH_WHEEL_KERNELS", str(tmp_path / "kernels"))
    done = pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), ".", find=tmp_path)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{arch}.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    bare = {"PATH": str(tmp_path / "nowhere"), "HOME": str(tmp_path), "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=False, cwd=tmp_path, env=bare
    )
    assert ran.returncode == 0, ran.stderr
    library = site / f"accelpatch/kernels/prebuilt/cpu-{arch}"
    found = [f"came with accelpatch, {library}", native_library.isa(), str(site / "accelpatch/__init__.py")]
    assert ran.stdout.splitlines() == found
    assert ran.stderr == ""


def test_requirements_are_ranges() -> None:
    for text in PROJECT["dependencies"]:
        assert {part.operator for part in Requirement(text).specifier} <= {">=", "<"}, text


def test_constraints_pin_every_requirement_inside_its_range() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    developers = [one for extra in ("dev", "plot", "train") for one in PROJECT["optional-dependencies"][extra]]
    for text in PROJECT["dependencies"] + developers:
        wanted = Requirement(text)
        if wanted.name != "accelpatch":
            assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text


def test_constraints_name_no_host() -> None:
    assert not re.search(r"://|--index|--extra|--find", (ROOT / "constraints.txt").read_text())


@pytest.mark.smoke
def test_the_claimed_ends_of_transformers_are_the_tested_ones() -> None:
    claimed = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("transformers"))
    oldest = re.search(r"^OLDEST := transformers==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert oldest is not None
    assert claimed.specifier.contains(oldest[1])
    ends = (oldest[1], PINS["transformers"])
    assert metadata.version("transformers") in ends
    minors = [".".join(end.split(".")[:2]) for end in ends]
    assert f"transformers {minors[0]} to {minors[1]}." in (ROOT / "README.md").read_text()
