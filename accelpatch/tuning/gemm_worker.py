"""A child process that tunes one GEMM after the other on its GPU: a line of an untuned file in, a line of JSON out.

The first line out names the validators and the arch, or says why nothing can be tuned.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

TOLERANCES = (1e-2, 1e-2)  # absolute and relative, of half precision: a solution beyond them does not count
MILLISECONDS = 30  # the most that one solution is timed


def main() -> None:
    """Serve until stdin ends."""
    import torch
    from torch.cuda import tunable

    from accelpatch import device as devices
    from accelpatch.runtime import tuned_gemms

    if not torch.cuda.is_available():
        _say({"error": f"torch {torch.__version__} sees no GPU"})
        return
    tunable.enable(True)
    tunable.tuning_enable(True)
    tunable.record_untuned_enable(False)
    tunable.set_max_tuning_duration(MILLISECONDS)
    if hasattr(tunable, "set_numerical_check_tolerances"):
        tunable.set_numerical_check_tolerances(True, *TOLERANCES)
    with tempfile.TemporaryDirectory() as folder:
        tunable.set_filename(str(Path(folder, "results.csv")))
        _say({"validators": tuned_gemms.present_validators(devices.probe("cuda:0"))})
        for line in sys.stdin:
            _say(_tuned(tunable, tuned_gemms.line_of, line, Path(folder, "untuned.csv")))


def _tuned(tunable: Any, line_of: Any, line: str, file: Path) -> dict[str, Any]:
    before = {line_of(one) for one in tunable.get_results()}
    file.write_text(line, encoding="utf-8")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tunable.tune_gemm_in_file(str(file))
    found = [one for one in map(line_of, tunable.get_results()) if one not in before]
    return {"results": found} if found else {"failed": str(said[-1].message) if said else "torch tuned nothing for it"}


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
