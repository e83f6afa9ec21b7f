"""The folder from which the tests run: those of a checkout, with the newer common files of a source distribution.

A source distribution has ``tests/test_*.py`` alone; ``tests/models`` and ``tests/generation`` are in a checkout only.
Where the checkout is of another version than the one installed, its ``tests/test_*.py`` are replaced by those of the
installed version's source distribution, which pip fetches.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import transformers


def version_of(checkout: Path) -> str:
    """The version of transformers that a checkout is of."""
    text = (checkout / "src/transformers/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    assert found, "a checkout of transformers names its version"
    return found[1]


def assemble(checkout: Path, work: Path) -> Path:
    """The folder to run pytest in, made anew below `work`; transformers is the installed one."""
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("tests", "utils"):
        shutil.copytree(checkout / name, folder / name, symlinks=True)
    if version_of(checkout) != transformers.__version__:
        for file in (_source_distribution(work) / "tests").glob("*.py"):
            shutil.copy(file, folder / "tests")
    (folder / "src").mkdir()
    (folder / "src/transformers").symlink_to(Path(transformers.__file__).parent)  # tests read sources there
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def _source_distribution(work: Path) -> Path:
    name = f"transformers-{transformers.__version__}"
    if not (work / name).is_dir():
        words = ["--no-deps", "--no-binary", "transformers", "--dest", str(work)]
        command = [sys.executable, "-m", "pip", "download", *words, name.replace("-", "==")]
        subprocess.run(command, check=True, stdout=sys.stderr)
        with tarfile.open(work / f"{name}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    return work / name
