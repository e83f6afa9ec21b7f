"""The model card of a saved patched model: what it is, and how it is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FILE = "README.md"
CARD = """---
library_name: transformers
tags:
- accelpatch
{base}---

# {name}

{architecture}{of}, quantised by accelpatch's recipe `{recipe}` ([recipe.yaml](recipe.yaml)).

```python
import accelpatch  # transformers cannot read these weights without it, and would make random ones
from transformers import {loader}

model = {loader}.from_pretrained("{name}")
```

`accelpatch run {name}` answers a prompt with it.
"""


def write(folder: Path, name: str, model: Any, recipe: str) -> None:
    """Write the card of `model` into `folder`. name: of the folder in the end. recipe: the name of its recipe."""
    architecture = type(model).__name__
    source = str(getattr(model.config, "_name_or_path", "") or "")
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not Path(source).exists()
    text = CARD.format(
        name=name, architecture=architecture, recipe=recipe, of=f" of {source}" if hub else "",
        base=f"base_model: {source}\n" if hub else "",
        loader="AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else architecture,
    )  # fmt: skip
    (folder / FILE).write_text(text, encoding="utf-8")


def is_ours(file: Path) -> bool:
    """Whether a file is a card that `write` wrote, and not the user's."""
    return file.name == FILE and file.read_text(encoding="utf-8", errors="replace").startswith(CARD.split("{base}")[0])
