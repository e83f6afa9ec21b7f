"""Reads a log as a stream: the GEMMs in it with their calls, and what was left out, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from accelpatch.errors import AccelpatchError

from .gemms import Gemm
from .lines import Call, LineError, form_of, parse

LONGEST = 1 << 16  # characters of a line; a longer one is none of a GEMM
REMEMBERED = 20_000  # lines whose meaning is kept: programs repeat theirs
NAMED = 20  # lines that are left out and shown
RECORD = "run the program with HIPBLASLT_LOG_MASK=64 HIPBLASLT_LOG_FILE=hipblaslt.log"


@dataclass
class Found:
    """What one form's lines in a log say. calls: of each problem. epilogues: what came after its product."""

    calls: Counter[Gemm] = field(default_factory=Counter)
    epilogues: dict[Gemm, set[str]] = field(default_factory=dict)
    lines: int = 0

    def add(self, call: Call) -> None:
        """Count a line's calls."""
        self.lines += 1
        self.calls[call.gemm] += call.calls
        if call.epilogue:
            self.epilogues.setdefault(call.gemm, set()).add(call.epilogue)


@dataclass
class Log:
    """A log that was read. form: that of its GEMMs. skipped: (line number, reason) of the first NAMED lines that name a
    GEMM and cannot be used; `unusable` counts all of them. other: lines of something else. notes: what else to know."""

    form: str
    found: Found
    skipped: list[tuple[int, str]] = field(default_factory=list)
    unusable: int = 0
    other: int = 0
    notes: list[str] = field(default_factory=list)


def _lines(file: Path) -> Iterator[tuple[int, str | None]]:
    """(number, text) of each line; None for one that is longer than LONGEST. Bytes that are no UTF-8 are replaced."""
    with file.open("rb") as stream:
        number, long = 0, False
        while piece := stream.readline(LONGEST):
            ended = piece.endswith(b"\n")
            if not long:
                number += 1
                whole = ended or len(piece) < LONGEST
                yield number, piece.decode("utf-8", "replace").strip() if whole else None
            long = not ended


def read(file: str | Path) -> Log:
    """The GEMMs of a log of hipBLASLt, rocBLAS or TunableOp.

    A log with several forms names the same calls several times (HIPBLASLT_LOG_MASK=96 does), so the form with the most
    calls counts alone. Raises AccelpatchError for a file that cannot be read or names no usable GEMM.
    """
    forms: dict[str, Found] = {}
    log = Log("", Found())
    known: dict[str, Call] = {}
    try:
        for number, line in _lines(Path(file)):
            form = None if line is None else form_of(line)
            if line is None or form is None:
                log.other += line is None or bool(line)
                continue
            call = known.get(line)
            if call is None:
                try:
                    call = parse(line, form)
                except LineError as error:
                    log.unusable += 1
                    if len(log.skipped) < NAMED:
                        log.skipped.append((number, str(error)))
                    continue
                if len(known) < REMEMBERED:
                    known[line] = call
            forms.setdefault(form, Found()).add(call)
    except OSError as error:
        raise AccelpatchError(f"the log {file} cannot be read ({error.strerror or error}): {RECORD}") from None
    return _chosen(log, forms, file)


def _chosen(log: Log, forms: dict[str, Found], file: str | Path) -> Log:
    if not forms:
        why = f"; line {log.skipped[0][0]}: {log.skipped[0][1]}" if log.skipped else ""
        raise AccelpatchError(f"{file} names no GEMM that can be tuned{why}; {RECORD}")
    log.form = max(forms, key=lambda name: (forms[name].calls.total(), name))
    log.found = forms[log.form]
    for name, found in forms.items():
        if name != log.form:
            log.notes.append(
                f"{found.lines} lines of {name} are left out: the forms of one log name the same calls again, and "
                f"{log.form} has the most; what is of another program belongs in a log of its own"
            )
    return log
