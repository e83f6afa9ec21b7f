"""Calibration statistics on disk: a safetensors file, PATH.absmax, .percentile, .mean_square and .rows of each site,
and .output_absmax of q, k and v.

Its header says: accelpatch_statistics: JSON {version, fingerprint, tokens}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from accelpatch.errors import KernelError, LoadError, SaveError
from accelpatch.quant.calibration import FIGURES, ChannelStatistics, Statistics

KEY, VERSION = "accelpatch_statistics", 1
PARTS = (*FIGURES, "rows", "output_absmax")


def save(statistics: Statistics, file: Path) -> None:
    """Write the file by one atomic rename. Raises SaveError where it cannot be written."""
    tensors = {
        f"{path}.{name}": tensor
        for path, one in statistics.sites.items()
        for name in PARTS
        if (tensor := getattr(one, name)) is not None
    }
    facts = {"version": VERSION, "fingerprint": statistics.fingerprint, "tokens": statistics.tokens}
    unfinished = file.with_name(f".{file.name}.writing")
    try:
        save_file(tensors, unfinished, metadata={KEY: json.dumps(facts)})
        unfinished.replace(file)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{file} cannot be written ({error}): name another file") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load(file: Path) -> Statistics:
    """Read a file that `save` wrote. Raises LoadError for any other, or a damaged one."""
    try:
        with safe_open(file, framework="pt") as opened:
            facts = _facts(file, opened.metadata())
            tensors: dict[str, torch.Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} cannot be read as statistics ({error}): calibrate again") from error
    sites: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, figure = name.rpartition(".")
        if figure not in PARTS:
            raise LoadError(f"{file}: {name} is no statistic: calibrate again")
        sites.setdefault(path, {})[figure] = tensor
    try:
        made = {path: ChannelStatistics(**figures) for path, figures in sites.items()}
    except (KernelError, TypeError) as error:
        raise LoadError(f"{file} is damaged: {error}") from error
    return Statistics(made, facts["fingerprint"], facts["tokens"])


def _facts(file: Path, metadata: Any) -> dict[str, Any]:
    try:
        facts = json.loads((metadata or {})[KEY])
        version, known = facts["version"], isinstance(facts["fingerprint"], str) and isinstance(facts["tokens"], int)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} holds no calibration statistics: write some with accelpatch calibrate") from error
    if version != VERSION or not known:
        raise LoadError(f"{file} has version {version!r} of the format, and this accelpatch reads {VERSION}")
    return dict(facts)
