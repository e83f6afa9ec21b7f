"""The parameters of one patch: made by the public functions, read by every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.patching.apply import Built
from accelpatch.patching.extent import UNVERIFIED, Extent
from accelpatch.patching.placement import WHOLE, Placement
from accelpatch.patching.plan import Plan
from accelpatch.progress import Stopwatch


@dataclass(frozen=True, eq=False)
class Request:
    """A plan to carry out, and how.

    watch: receives progress. inputs: the user's samples; None: samples are made for the model. keep_original: see
    `patch`. extent: what is verified. loaded: path -> replacement that loading a checkpoint has built already, smoothed
    weights included; its original is gone. save: what `save_pretrained` of the patched model calls. statistics:
    calibration statistics, or the file with them; None: computed from `data` (as in `patch`), tokenized by `tokenizer`;
    without data, from text that the model generates. placement: where the model's parts are. resume: a folder in which
    calibration keeps finished work, so that an interrupted patch can go on.
    """

    planned: Plan
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(None))
    inputs: Any = None
    keep_original: str = "none"
    extent: Extent = UNVERIFIED
    loaded: Mapping[str, Built] = field(default_factory=dict)
    save: Any = None
    statistics: Any = None
    data: Any = None
    tokenizer: Any = None
    resume: Path | None = None
    placement: Placement = WHOLE
