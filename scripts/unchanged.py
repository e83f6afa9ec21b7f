"""Runs a command unless everything that its outcome follows from is as it was when it last passed.

    python scripts/unchanged.py NAME PATH... -- COMMAND...

The paths are files and folders of the repository that the command reads; its modules that these import are added. A
digest of all that, of scripts/setup.sh (the versions of the compilers) and of the command itself is held against the
entry NAME of scripts/unchanged.json. A command that passes has its digest written there, to be committed; with CI=true
nothing is written. With ALL=true, as in `make test-all`, the command runs in any case.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PASSED = ROOT / "scripts/unchanged.json"
ALWAYS = ("scripts/setup.sh", "scripts/unchanged.py")


def files_of(paths: Sequence[str]) -> Iterator[Path]:
    """Tracked and new files of the paths. Exits for a path that holds none."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--"]
    for path in {*paths, *ALWAYS}:
        found = subprocess.run([*listed, path], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        files = [ROOT / name for name in found.split("\0") if name and (ROOT / name).is_file()]
        if not files:
            sys.exit(f"unchanged: no file of the repository is {path}")
        yield from files


def file_of(module: str) -> Path | None:
    """The repository's file of a module: from the root, or beside a script that imports it."""
    for folder in (ROOT, ROOT / "scripts"):
        place = folder.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def imported(file: Path) -> Iterator[Path]:
    """The repository's files that a file imports, in functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if file_of(name) else node.module for name in inside]
        yield from filter(None, map(file_of, names))


def with_imports(files: Iterator[Path]) -> list[Path]:
    """The files and all that they import, one through the other, in order."""
    found, left = set[Path](), list(files)
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += imported(file) if file.suffix == ".py" else ()
    return sorted(found)


def digest(paths: Sequence[str], command: Sequence[str]) -> str:
    """Of the names and bytes of all files, of the command, and of the minor version of this Python."""
    found = hashlib.sha256(json.dumps([*command, *sys.version_info[:2]]).encode())
    for file in with_imports(files_of(paths)):
        found.update(str(file.relative_to(ROOT)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def main(words: Sequence[str]) -> int:
    """The command's exit status; 0 where it need not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="The entry of scripts/unchanged.json.")
    parser.add_argument("paths", nargs="+", metavar="path", help="What the command reads.")
    cut = words.index("--") if "--" in words else len(words)
    given, command = parser.parse_args(words[:cut]), words[cut + 1 :]
    if not command:
        parser.error("the command is missing: NAME PATH... -- COMMAND...")
    name, paths = given.name, given.paths
    now, passed = digest(paths, command), json.loads(PASSED.read_text())
    if passed.get(name) == now and os.environ.get("ALL") != "true":
        print(f"{name}: passed before, and nothing that it reads has changed since")
        return 0
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        return status
    if not {os.environ.get("CI"), os.environ.get("ALL")} & {"true"}:
        held = json.loads(PASSED.read_text()) | {name: now}
        PASSED.write_text(json.dumps(dict(sorted(held.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
