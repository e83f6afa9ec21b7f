"""The folder of a run: its configuration, its log, whole checkpoints to go on from, and at the end the result.

    DIR/finetune.yaml       the configuration with every value, and a fingerprint of the data
    DIR/log.jsonl           one JSON object a line of the log
    DIR/checkpoints/        checkpoint-STEP, marked as whole once its last byte is written
    DIR/adapter_model.safetensors, adapter_config.json (of `full` a whole model), plot.png, result.json

A run in a folder that holds the same one goes on from its last whole checkpoint. Loads neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelpatch.errors import SaveError
from accelpatch.training import configuration
from accelpatch.training.configuration import Configuration
from accelpatch.training.rows import Row

SETTINGS, LOG, CHECKPOINTS, RESULT, PLOT = "finetune.yaml", "log.jsonl", "checkpoints", "result.json", "plot.png"
WHOLE = "accelpatch_whole"  # the file in a checkpoint that says that all the others are written
DATA = "# data: "


@dataclass(frozen=True)
class Folder:
    """The folder of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the trainer writes."""
        return self.path / CHECKPOINTS

    def check(self, settings: Configuration, data: str, *, overwrite: bool = False) -> bool:
        """Whether the folder is this run's already. data: a `fingerprint`. Changes nothing.

        Raises SaveError where it holds something else, another run (unless `overwrite`), or a finished one.
        """
        if self.path.exists() and not self.path.is_dir():
            raise SaveError(f"{self.path} is a file: name a folder with --out")
        there = self.path.is_dir() and any(self.path.iterdir())
        if there and not (self.path / SETTINGS).is_file():
            raise SaveError(f"{self.path} is there, and holds no fine-tuning run: name another folder with --out")
        if there and not overwrite:
            self._check_same(settings, data)
        return there and not overwrite

    def claim(self, settings: Configuration, data: str, *, overwrite: bool = False) -> None:
        """Make the folder this run's. Raises as `check`, and where it cannot be written."""
        if self.check(settings, data, overwrite=overwrite):
            return
        try:
            if overwrite and self.path.is_dir():
                self._clear()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            published(self.path / SETTINGS, f"{DATA}{data}\n{settings.dump()}")
        except OSError as error:
            raise SaveError(f"{self.path} cannot be written ({error.strerror}); name another folder") from None

    def _check_same(self, settings: Configuration, data: str) -> None:
        first, _, text = (self.path / SETTINGS).read_text(encoding="utf-8").partition("\n")
        before = configuration.load(self.path / SETTINGS) if text else None
        differ = [] if before is None else configuration.differences(before, settings)
        differ += [] if first == f"{DATA}{data}" else ["the data"]
        if before is None or differ:
            raise SaveError(
                f"{self.path} holds a run with other settings ({'; '.join(differ[:4]) or 'unreadable'}; before, now): "
                "give --out another folder, or --overwrite to begin anew in this one"
            )
        if (self.path / RESULT).is_file():
            raise SaveError(
                f"{self.path} holds this run, finished: accelpatch run MODEL --adapter {self.path} uses it; give --out "
                "another folder, or --overwrite to begin anew"
            )

    def _clear(self) -> None:
        """Remove what runs write there, and nothing else."""
        known = {SETTINGS, LOG, RESULT, PLOT, "README.md"}
        for file in self.path.iterdir():
            if file.name == CHECKPOINTS:
                shutil.rmtree(file)
            elif file.name in known or file.suffix in (".safetensors", ".json", ".jinja"):
                file.unlink()

    def whole(self) -> list[int]:
        """Steps of the checkpoints that are whole, sorted."""
        found = self.checkpoints.glob(f"checkpoint-*/{WHOLE}")
        return sorted(int(file.parent.name.rpartition("-")[2]) for file in found)

    def last(self) -> Path | None:
        """The last whole checkpoint; removes what a kill left of others after it."""
        steps = self.whole()
        for path in self.checkpoints.glob("checkpoint-*"):
            if not (path / WHOLE).is_file():
                shutil.rmtree(path, ignore_errors=True)
        return self.checkpoints / f"checkpoint-{steps[-1]}" if steps else None

    def finish(self, made: Path, result: Mapping[str, Any]) -> None:
        """Move the files of the folder `made`, which lies inside this one, here, then write the result."""
        for file in sorted(made.iterdir()):
            os.replace(file, self.path / file.name)
        made.rmdir()
        published(self.path / RESULT, json.dumps(result, indent=2) + "\n")

    def log(self) -> list[dict[str, Any]]:
        """The lines of the log; one that a kill cut off is left out."""
        found = []
        if (self.path / LOG).is_file():
            for line in (self.path / LOG).read_text(encoding="utf-8").splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return found

    def keep_log(self, most: int) -> list[dict[str, Any]]:
        """Drop the log's lines of steps after `most`, which are done again; returns what is left."""
        kept = [one for one in self.log() if one.get("step", 0) <= most]
        published(self.path / LOG, "".join(json.dumps(one) + "\n" for one in kept))
        return kept


def published(file: Path, text: str) -> None:
    """Write a file in one step: it is there whole, or as it was."""
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)


def fingerprint(*parts: Sequence[Row]) -> str:
    """Sixteen hexadecimal digits that differ for other rows, or another order."""
    found = hashlib.sha256()
    for rows in parts:
        found.update(json.dumps([row.values for row in rows], sort_keys=True).encode())
    return found.hexdigest()[:16]
