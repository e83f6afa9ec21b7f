"""Library logic: which solution serves which size, as TensileLite writes it and TensileMergeLibrary reads it.

A file is a list (the names of its places are in TensileMergeLibrary.py): version, schedule, arch, devices, problem
type, solutions, order of indices, exact sizes [[m, n, batch, k], [solution, gflops]], ranges, ...; for some archs it is
a mapping with those names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from accelpatch.errors import AccelpatchError

from .configuration import LOADER, text

SCHEDULE, ARCH, PROBLEM, SOLUTIONS, EXACT = 1, 2, 4, 5, 7
NAMES = {SCHEDULE: "ScheduleName", ARCH: "ArchitectureName", PROBLEM: "ProblemType", SOLUTIONS: "Solutions",
         EXACT: "ExactLogic"}  # fmt: skip
Size = tuple[int, ...]


@dataclass
class Logic:
    """A file of library logic. name: of the file. document: a list or a mapping, see above."""

    name: str
    document: Any

    def part(self, place: int) -> Any:
        """What stands at SCHEDULE, ARCH, PROBLEM, SOLUTIONS or EXACT."""
        return self.document[NAMES[place] if isinstance(self.document, dict) else place]

    def set(self, place: int, value: Any) -> None:
        """Put something else there."""
        self.document[NAMES[place] if isinstance(self.document, dict) else place] = value

    def sizes(self) -> list[tuple[Size, int, float]]:
        """(m, n, batch, k), the place of its solution, and its gflops."""
        return [(tuple(size[:4]), int(solution), float(rate)) for size, (solution, rate) in self.part(EXACT)]

    def keep(self, wanted: Callable[[Size], bool]) -> bool:
        """Leave only these sizes, and the solutions that they need. Returns whether any is left."""
        _fill(self, [(self, one) for one in self.sizes() if wanted(one[0])])
        return bool(self.part(EXACT))


def read(file: Path) -> Logic:
    """A file of library logic. Raises AccelpatchError for one of another form."""
    try:
        found = Logic(file.name, yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER))
        count = len(found.part(SOLUTIONS))
        if not isinstance(found.part(PROBLEM), dict):
            raise ValueError("its problem type is no mapping")
        if any(len(size) != 4 or not 0 <= solution < count for size, solution, _ in found.sizes()):
            raise ValueError("a size has no solution")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise AccelpatchError(f"{file} is no library logic ({type(error).__name__}: {why:.120})") from None
    return found


@dataclass
class Merged:
    """Several files as one a problem type. left_out: file -> why it was."""

    of: list[Logic] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def merge(files: Iterable[Path]) -> Merged:
    """Files of library logic as one a problem type; where two serve a size, the faster one does."""
    found, groups = Merged(), dict[str, list[Logic]]()
    for file in files:
        try:
            one = read(file)
        except AccelpatchError as error:
            found.left_out[str(file)] = str(error)
            continue
        groups.setdefault(
            repr((one.part(SCHEDULE), one.part(ARCH), sorted(one.part(PROBLEM).items(), key=str))), []
        ).append(one)
    for place, group in enumerate(groups.values()):
        best: dict[Size, tuple[Logic, tuple[Size, int, float]]] = {}
        for one in group:
            for entry in one.sizes():
                if entry[0] not in best or best[entry[0]][1][2] < entry[2]:
                    best[entry[0]] = one, entry
        merged = Logic(_name(group[0].name, place, found.of), copy.deepcopy(group[0].document))
        _fill(merged, list(best.values()))
        found.of.append(merged)
    return found


def _name(name: str, place: int, others: Sequence[Logic]) -> str:
    return name if name not in {one.name for one in others} else f"{place}_{name}"


def _fill(target: Logic, entries: Sequence[tuple[Logic, tuple[Size, int, float]]]) -> None:
    """Give it these sizes, with the solutions of the logic that each is from."""
    solutions: list[Any] = []
    places: dict[tuple[int, int], int] = {}
    exact = []
    for source, (size, solution, rate) in entries:
        key = id(source), solution
        if key not in places:
            places[key] = len(solutions)
            solutions.append({**copy.deepcopy(source.part(SOLUTIONS)[solution]), "SolutionIndex": places[key]})
        exact.append([list(size), [places[key], rate]])
    target.set(SOLUTIONS, solutions)
    target.set(EXACT, exact)


def make(
    name: str, schedule: str, arch: str, problem: Any, solution: dict[str, Any], size: Size, gflops: float
) -> Logic:
    """Logic of one solution for one size, for what has no TensileLite to write it."""
    head: list[Any] = [{"MinimumRequiredVersion": "5.0.0"}, schedule, arch, []]
    solutions = [{"SolutionIndex": 0, **solution}]
    rest = [[2, 3, 0, 1], [[list(size[:4]), [0, round(gflops, 3)]]], None, None, "DeviceEfficiency", "Equality"]
    return Logic(name, [*head, dict(problem), solutions, *rest])


def as_text(found: Logic) -> str:
    """It as YAML."""
    if isinstance(found.document, dict):
        return text(found.document)
    from .configuration import DUMPER

    return str(yaml.dump(found.document, Dumper=DUMPER, sort_keys=False, default_flow_style=None, width=110))
