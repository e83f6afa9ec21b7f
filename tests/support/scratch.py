"""A copy of this checkout to which the chapters of docs/contributing are applied, and pytest runs inside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("accelpatch", "recipes", "docs", "tests", "scripts", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "fixtures", "*.png", ".*")
NEW_FILE = re.compile(r"^(?:.*[^`\n] )?`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# One process imports what is slow, and each run is a fork of it.
RUNS = """
import json, os, sys
import pytest, torch, transformers
from transformers import LlamaForCausalLM
runs = json.loads(sys.argv[1])
status = {}
for folder, words in runs.items():
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path.insert(0, folder)
        log = os.open("log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words])
        sys.stdout.flush()
        os._exit(code)
    status[folder] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(status))
"""


def new_files(page: str) -> dict[str, str]:
    """Path -> text of the files that a page shows whole: a line that ends in their name, and a block of Python."""
    return dict(NEW_FILE.findall(page))


def changed_files(page: str) -> list[str]:
    """Paths of the Python files that a page shows or patches."""
    return [*new_files(page), *re.findall(r"^\+\+\+ b/(.*\.py)$", page, re.MULTILINE)]


def copied(folder: Path) -> Path:
    """A copy of what the chapters change and what their tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def apply(page: str, folder: Path) -> str:
    """Write the page's new files and apply its patches, as a reader does; gives what git says against them."""
    for name, text in new_files(page).items():
        assert not (folder / name).exists(), name
        (folder / name).write_text(text)
    said = ""
    for patch in DIFF.findall(page):
        done = subprocess.run(
            ["git", "apply", "-"], cwd=folder, input=patch, capture_output=True, text=True, check=False,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        )  # fmt: skip
        said += done.stderr
    return said


def run(runs: Mapping[Path, Sequence[str]]) -> dict[Path, tuple[int, str]]:
    """Run pytest with its words in each folder; gives its exit status and what it printed."""
    words = {str(folder): list(given) for folder, given in runs.items()}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(words)], env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=next(iter(runs)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout.splitlines()[-1])
    return {folder: (status[str(folder)], (folder / "log").read_text()) for folder in runs}
