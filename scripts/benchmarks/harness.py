"""What the topics of scripts/bench.py have in common: options, cases, where a run took place, tables and pictures.

A topic has a text (its help), options, among them its table of cases, and `run(asked)`, which prints what it finds and
returns it as plain data for --json. A module with one topic has these as its docstring, OPTIONS and run; one with
several has a table of Topic by name, TOPICS. Models that generate are timed by engines.py, kernels by kernels.py.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.bench import plot
from accelpatch.bench.generate import Shape, prompt_ids
from accelpatch.device import probe

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "triton", "accelerate", "torchao", "bitsandbytes", "llama-cpp-python")
#: a part of a column's name -> how its numbers are printed; the first that is found counts
FORMATS = {
    "times": ".2f", "of float32": ".3f", "ratio": ".2f", "share": ".1%", "spread": ".0%", "tok/s": ".1f",
    "ms a step": ".3f", "chain": ".3f", "TFLOP/s": ".1f", "GB": ".2f", "MB": ".1f", ", ms": ".1f", ", us": ".2f",
    ", s": ".2f",
}  # fmt: skip


@dataclass(frozen=True)
class Case(Shape):
    """`batch` sequences, tokens of the prompt of each, and new tokens: "8x128+64"; without the last part 128."""

    new: int = 128

    @classmethod
    def read(cls, text: str) -> Case:
        sizes, _, new = text.partition("+")
        batch, prompt = sizes.split("x")
        return cls(int(batch), int(prompt), int(new or cls.new))

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}+{self.new}"

    def ids(self, model: Any) -> Tensor:
        """Fixed random ids on the model's device."""
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        return prompt_ids(vocabulary, self).to(next(model.parameters()).device)


@dataclass(frozen=True)
class Topic:
    """One of several topics of a module."""

    text: str
    options: tuple[Option, ...]
    run: Callable[[argparse.Namespace], dict[str, Any]]


@dataclass(frozen=True)
class Option:
    """An option of a topic. help: a sentence. Its type is `kind`, or that of the default."""

    name: str
    default: Any
    help: str
    choices: Iterable[Any] | None = None
    kind: Callable[[str], Any] | None = None
    metavar: str | None = None
    required: bool = False

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add it; a sequence takes any number of words, a truth value none."""
        flag, default = f"--{self.name.replace('_', '-')}", self.default
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction if default else "store_true",
                                default=default, help=self.help)  # fmt: skip
            return
        many = isinstance(default, list | tuple)
        said = f"{self.help.removesuffix('.')} (default: {' '.join(map(str, default)) if many else default})."
        first = default[0] if many and default else "" if many or default is None else default
        words: dict[str, Any] = {"nargs": "+" if self.required else "*"} if many else {}
        words |= {"required": True} if self.required else {}
        if self.choices is not None:
            words["choices"] = list(self.choices)
        parser.add_argument(flag, type=self.kind or type(first), default=default, metavar=self.metavar,
                            help=self.help if default in (None, [], ()) else said, **words)  # fmt: skip


COMMON = {
    "model": "Short name of the model whose shape is used, with random weights.",
    "device": "Where it runs.",
    "dtype": "The type of the weights and activations.",
    "recipes": "The recipes to patch with.",
    "repeats": "Timed turns, of which the median counts.",
}


def common(**defaults: Any) -> tuple[Option, ...]:
    """Options that many topics have, with a topic's own defaults."""
    return tuple(Option(name, default, COMMON[name]) for name, default in defaults.items())


def cases(default: Sequence[Any] | Mapping[str, Any], help: str = "", choices: Iterable[Any] | None = None) -> Option:
    """The option --cases of a table: of Case, as words like 8x128+64, or of anything that has a name."""
    if default and isinstance(next(iter(default)), Case):
        said = "Sequences at once, tokens of the prompt of each, and new tokens, which may be left out: 128."
        return Option("cases", list(default), said, kind=Case.read, metavar="BATCHxPROMPT+NEW")
    return Option("cases", list(default), help or "Which of the cases to time.", choices=choices or list(default))


PLOT = Option("plot", None, "Draw the figures (.png, .svg, .pdf). It needs matplotlib.", kind=Path, metavar="FILE")
TINY = Option("tiny", False, "Take small sizes, to try the program on a CPU.")


def device_of(asked: argparse.Namespace) -> torch.device:
    """That of the run: --device, or the GPU where there is one."""
    return torch.device(getattr(asked, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu"))


def facts(asked: argparse.Namespace) -> dict[str, Any]:
    """What a figure stands beside: command, day, device, commit, versions, options."""
    device, versions = device_of(asked), {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    return {
        "command": shlex.join(["python", "scripts/bench.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit or "unknown",
        "device": probe(device).name, "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "versions": {"python": platform.python_version(), **versions},
        "options": {name: str(value) for name, value in vars(asked).items()},
    }  # fmt: skip


def said(run: Mapping[str, Any]) -> str:
    """The facts as two lines."""
    threads = f", {run['threads']} threads" if run["threads"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return f"{run['command']}\n{run['device']}{threads}, {run['date']}, commit {run['commit']}, {versions}"


class Table:
    """A Markdown table whose rows are printed as they come; `rows` has all of them, for --json."""

    def __init__(self, title: str = "") -> None:
        self.rows: list[dict[str, Any]] = []
        self._title, self._heads = title, list[str]()

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Print rows: column -> text, a number, None for no figure, or the low and the high end of a spread.

        The head is printed before the first row, and again where a row brings a column that it lacks.
        """
        heads = list(dict.fromkeys([*self._heads, *(head for row in rows for head in row)]))
        if heads != self._heads:
            print(f"\n{self._title}\n" if self._title else "")
            print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        self._heads = heads
        for row in rows:
            self.rows.append(dict(row))
            print(f"| {' | '.join(cell(head, row.get(head)) for head in heads)} |", flush=True)


def cell(head: str, value: Any) -> str:
    """A value as its column has it."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " to ".join(cell(head, one) for one in value)
    if isinstance(value, float):
        return format(value, next((form for part, form in FORMATS.items() if part in head), ".3g"))
    return str(value)


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> list[dict[str, Any]]:
    """Print rows that are all there, with the columns of all of them; returns them."""
    printed = Table(title)
    printed.add(*rows)
    return printed.rows


def bars(panels: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: Path, marked: str) -> None:
    """Draw medians as bars, from the least to the most as whiskers: panel -> label -> what was measured.

    marked: the labels with this word are ours.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.4), layout="constrained")
    for axes, (label, found) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        middle = [statistics.median(one) for one in found.values()]
        ends = [(m - min(one), max(one) - m) for m, one in zip(middle, found.values(), strict=True)]
        colors = [plot.COLORS["patched" if marked in name else "original"] for name in found]
        drawn = axes.barh(list(found), middle, xerr=list(zip(*ends, strict=True)), capsize=3, color=colors)
        axes.bar_label(drawn, fmt="%.4g", padding=12, fontsize=8)
        axes.set_title(label, fontsize=10)
        axes.margins(x=0.2)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
