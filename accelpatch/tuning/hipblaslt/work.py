"""The folder that a tuning works in: where things lie, which stages are done, and files that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

VERSION = 1
STAGES = ("configs", "optimize", "merge", "benchmark", "postprocess")
LEAST_SPACE = 64 << 20  # bytes that must be free before a stage begins
STATE, SUMMARY = "state.json", "summary.csv"


@dataclass(frozen=True)
class Work:
    """The folder of one tuning."""

    folder: Path

    @property
    def summary(self) -> Path:
        """The problems of the log and their shares."""
        return self.folder / SUMMARY

    def part(self, *names: str) -> Path:
        """A folder in it, made where it is missing."""
        found = self.folder.joinpath(*names)
        try:
            found.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(found, error) from None
        return found

    def build(self, name: str) -> Path:
        """The folder of one GEMM's search."""
        return self.folder / "tunings" / f"build_{name}"

    def state(self) -> dict[str, Any]:
        """What is known of the tuning in this folder; empty where none was begun. Raises AccelpatchError for a state of
        another version."""
        try:
            found = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise AccelpatchError(f"{self.folder / STATE} cannot be read ({error}): {ANEW}") from None
        if not isinstance(found, dict) or found.get("version") != VERSION or not _is_state(found):
            raise AccelpatchError(f"{self.folder / STATE} is of another version of accelpatch: {ANEW}")
        return found

    def settings(self) -> Mapping[str, Any]:
        """What `configs` was called with. Raises AccelpatchError where it was not run in this folder."""
        found = self.state().get("settings")
        if found is None:
            raise AccelpatchError(
                f"{self.folder} holds no tuning: `accelpatch tune hipblaslt configs LOG --out {self.folder}` begins one"
            )
        return dict(found)

    def begin(self, settings: Mapping[str, Any]) -> bool:
        """Whether `configs` is already done with these settings; else they are written down. Raises AccelpatchError
        where the folder holds the work of others."""
        state = self.state()
        was = state.get("settings")
        if was is not None and was != settings:
            changed = [name for name in settings if was.get(name) != settings[name]]
            raise AccelpatchError(
                f"{self.folder} holds a tuning with another {' and '.join(changed) or 'setting'} "
                f"({', '.join(f'{was.get(name)!s:.60}' for name in changed)}): {ANEW}"
            )
        if was is None:
            self.check_space()
            write(self.part() / STATE, json.dumps({"version": VERSION, "settings": dict(settings), "done": []}))
        return "configs" in state.get("done", ())

    def done(self, stage: str) -> bool:
        """Whether a stage has ended."""
        return stage in self.state().get("done", ())

    def finish(self, stage: str) -> None:
        """Write down that a stage has ended; those after it are to be done again."""
        self.reopen(stage)
        state = self.state()
        write(self.folder / STATE, json.dumps({**state, "done": [*state["done"], stage]}, indent=1))

    def reopen(self, stage: str) -> None:
        """Write down that a stage, and so those after it, are to be done again."""
        state = self.state()
        state["done"] = [one for one in STAGES[: STAGES.index(stage)] if one in state.get("done", ())]
        write(self.folder / STATE, json.dumps(state, indent=1))

    def check_space(self) -> None:
        """Raise AccelpatchError where the disk of the folder is all but full."""
        place = self.folder if self.folder.exists() else self.folder.absolute().parent
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < LEAST_SPACE:
            raise AccelpatchError(
                f"{place} has {free >> 20} MiB free and a tuning needs {LEAST_SPACE >> 20}: free some, or give another "
                "folder with --out"
            )


def _is_state(found: Mapping[str, Any]) -> bool:
    settings, done = found.get("settings"), found.get("done")
    return isinstance(settings, dict) and {"arch", "platform"} <= settings.keys() and isinstance(done, list)


ANEW = "give another folder with --out, or remove this one to begin anew"


def write(file: Path, text: str) -> None:
    """Write a file that is there whole or not at all. Raises AccelpatchError where it cannot be."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _unwritable(file, error) from None


def _unwritable(file: Path, error: OSError) -> AccelpatchError:
    return AccelpatchError(
        f"{file} cannot be written ({error.strerror or error}): free space, or give another folder with --out; what is "
        "done is kept"
    )


def digest(file: Path) -> str:
    """Of a file's contents, so that another log is noticed."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
