"""What a fine-tuning run needs before anything is loaded: the packages, and its rows, read and checked.

Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError, RecipeError, TrainingError
from accelpatch.recipe import recipe as recipes
from accelpatch.training import puzzles, rows
from accelpatch.training.configuration import PUZZLES, Configuration
from accelpatch.training.folder import Folder, fingerprint
from accelpatch.training.rows import Row

NEEDED = ("trl", "peft", "datasets", "accelerate")


def check_packages() -> None:
    """Raise TrainingError where a package that training needs is not installed."""
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        raise TrainingError(
            f"fine-tuning needs {', '.join(missing)}; install what it needs with: pip install 'accelpatch[train]'"
        )


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


@dataclass(frozen=True)
class Run:
    """A run that was checked and whose data were read, before anything is loaded."""

    settings: Configuration
    folder: Folder
    train: Sequence[Row]
    held_out: Sequence[Row]

    @property
    def data(self) -> str:
        """The fingerprint of its rows."""
        return fingerprint(self.train, self.held_out)


def prepare(settings: Configuration, out: Path, data: Sequence[Mapping[str, Any]] | None = None) -> Run:
    """Read and check what needs no model. Raises RecipeError and LoadError."""
    preferences = settings["method"] == "dpo"
    if settings["recipe"] != "none":
        if settings["method"] == "full":
            raise RecipeError(
                f"method full trains every weight, and what the recipe {settings['recipe']} packs has no gradient: set "
                "recipe to none, or method to lora",
                source=settings.name,
            )
        recipes.load(settings["recipe"])
    if data is not None:
        train, held_out = rows.split(rows.from_memory(data, preferences=preferences), settings["data.held_out"])
    elif settings["data.file"] == PUZZLES:
        train, held_out = puzzles.as_rows(preferences)
    else:
        train, held_out = rows.read(Path(settings["data.file"]), preferences=preferences), []
        if settings["data.evaluation"] is None:
            train, held_out = rows.split(train, settings["data.held_out"])
    if settings["data.evaluation"] is not None:
        held_out = rows.read(Path(settings["data.evaluation"]), preferences=preferences)
    if not train:
        raise LoadError("there are no rows to train on: give more, or a smaller data.held_out")
    return Run(settings, Folder(out), train, held_out)
