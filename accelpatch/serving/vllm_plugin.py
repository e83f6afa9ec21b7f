"""The entry point `vllm.general_plugins`: where accelpatch is installed, vLLM serves the folders that it saves.

vLLM calls `register` in each of its processes. The rest of the plugin is in vllm_methods.py, which imports vLLM.
"""

from __future__ import annotations


def register() -> None:
    """Register the quantisation method `accelpatch`; again without effect."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from accelpatch.checkpoints.saved import METHOD
    from accelpatch.serving.vllm_methods import SavedConfig

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(SavedConfig)
