"""What one patch is asked to do: made by the public functions, read by every stage."""

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
    """A plan to carry out.

    watch: what progress is reported to. inputs: the user's samples; None: ones made for the model. keep_original: see
    `patch`. extent: what is verified. at_hand: path -> replacements that a checkpoint's loading has put there already,
    with all smoothing in them, and whose originals are gone. save: the model's `save_pretrained`. statistics: those of
    the user, or their file; None: made of `data`, which is as in `patch`, by way of `tokenizer`; None too: the model
    calibrates on its own text. placement: where the model's parts lie. resume: a folder for what calibration has made,
    from which an interrupted patch goes on.
    """

    planned: Plan
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(None))
    inputs: Any = None
    keep_original: str = "none"
    extent: Extent = UNVERIFIED
    at_hand: Mapping[str, Built] = field(default_factory=dict)
    save: Any = None
    statistics: Any = None
    data: Any = None
    tokenizer: Any = None
    resume: Path | None = None
    placement: Placement = WHOLE
