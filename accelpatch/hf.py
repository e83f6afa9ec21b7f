"""What transformers' from_pretrained uses of accelpatch: it loads saved patched models by it, and with
`quantization_config=AccelpatchConfig("int4")` quantises float checkpoints while they load.
"""

from __future__ import annotations

from accelpatch.api import register_checkpoints
from accelpatch.checkpoints.quantization_config import AccelpatchConfig
from accelpatch.checkpoints.quantizer import AccelpatchQuantizer

__all__ = ["AccelpatchConfig", "AccelpatchQuantizer"]

register_checkpoints()
