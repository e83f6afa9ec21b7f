"""GEMMs of torch's own libraries that TunableOp tuned: the file of them, and its use while a model is patched.

The file is torch's CSV: lines `Validator,NAME,VALUE`, then `OPERATOR,PARAMETERS,SOLUTION,MILLISECONDS`. One more
validator names the arch, which torch's own leave out on CUDA.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.cuda import tunable

from accelpatch.device import Device
from accelpatch.errors import PatchError

ARCH = "ACCELPATCH_ARCH"
TUNED = "_accelpatch_tuned_gemms"  # the attribute of a patched model that holds its Applied
VALIDATOR = "Validator"
TUNE = "run `accelpatch tune tunableop MODEL` again on this machine"


@dataclass(frozen=True)
class TunedGemms:
    """What a file holds. validators: name -> value. lines: of GEMMs, as torch writes them."""

    validators: Mapping[str, str]
    lines: tuple[str, ...]

    def text(self) -> str:
        """The file, as `accelpatch tune tunableop` writes it."""
        heads = [f"{VALIDATOR},{name},{value}" for name, value in self.validators.items()]
        return "".join(f"{line}\n" for line in (*heads, *self.lines))


def read(file: str | Path) -> TunedGemms:
    """What a file of tuned GEMMs holds. Raises PatchError for one that cannot be read or holds anything else."""
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PatchError(f"runtime.tunableop: {file} cannot be read ({error}): {TUNE}") from None
    heads = [line.split(",", 2) for line in lines if line.startswith(f"{VALIDATOR},")]
    rest = [line for line in lines if not line.startswith(f"{VALIDATOR},")]
    wrong = [line for line in rest if len(line.split(",")) not in (3, 4)]
    if not heads or wrong or any(len(head) != 3 for head in heads):
        said = f"its line {wrong[0]!r:.60} is none of a GEMM" if wrong else "it has no lines `Validator,NAME,VALUE`"
        raise PatchError(f"runtime.tunableop: {file} is no file of tuned GEMMs: {said}; {TUNE}")
    return TunedGemms({name: value for _, name, value in heads}, tuple(rest))


def present_validators(device: Device) -> dict[str, str]:
    """The validators of this process: torch's own, and the arch."""
    own: Any = tunable.get_validators()
    return {**dict(own), ARCH: device.arch}


def check(file: str | Path, device: Device) -> TunedGemms:
    """What a file holds. Raises PatchError where it was tuned with another release of a library, or on another arch."""
    found, here = read(file), present_validators(device)
    for name in sorted({*found.validators, *here}):
        was, now = found.validators.get(name), here.get(name)
        if was != now:
            what = "arch" if name == ARCH else name
            raise PatchError(
                f"runtime.tunableop: {file} was tuned for another machine or release: its {what} is "
                f"{was or 'not named'}, and here it is {now or 'not known'}; {TUNE}, or leave the key out"
            )
    return found


class _Switch:
    """TunableOp in this process: on while a model uses it, and then as it was before."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.RLock(), 0, (False, True)

    def on(self) -> None:
        with self._lock:
            if not self._users:
                self._before = tunable.is_enabled(), tunable.tuning_is_enabled()
                tunable.enable(True)
                tunable.tuning_enable(False)
            self._users += 1

    def off(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                enabled, tuning = self._before
                tunable.tuning_enable(tuning)
                tunable.enable(enabled)


_switch = _Switch()


class Applied:
    """A file's GEMMs in use, until `close()`. Raises PatchError where torch does not take them."""

    def __init__(self, found: TunedGemms, file: str):
        self._open = False
        _switch.on()
        self._open = True
        if not _given_to_torch(found):
            self.close()
            raise PatchError(f"runtime.tunableop: torch refuses {file}: {TUNE}")

    def close(self) -> None:
        """Stop using them."""
        if self._open:
            self._open = False
            _switch.off()

    __del__ = close  # the model went without being unpatched

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model uses them as long as this one does."""


def _given_to_torch(found: TunedGemms) -> bool:
    own = {name: value for name, value in found.validators.items() if name != ARCH}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gemms.csv")
        file.write_text(TunedGemms(own, found.lines).text(), encoding="utf-8")
        return bool(tunable.read_file(str(file)))


def line_of(result: Sequence[Any]) -> str:
    """The line of one of torch's results: operator, parameters, solution, milliseconds."""
    return ",".join(str(one) for one in result)
