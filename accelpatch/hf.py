"""Import this module, and transformers' from_pretrained loads saved patched models.

With `quantization_config=AccelpatchConfig("int4")` it quantises float checkpoints while they load.
"""

from __future__ import annotations

from accelpatch.api import register_checkpoints
from accelpatch.checkpoints.quantization_config import AccelpatchConfig

__all__ = ["AccelpatchConfig"]

register_checkpoints()
