"""Makes transformers know accelpatch's checkpoints once accelpatch is imported, before or after transformers.

`import accelpatch` imports neither torch nor transformers. What is entered into the tables of transformers imports the
rest when a checkpoint is loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

METHOD = "accelpatch"  # quant_method in config.json, checkpoints.saved.METHOD; not imported, since that needs torch
HOME = "transformers.quantizers.auto"
CONFIGS, QUANTIZERS = "AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"


class Config:
    """In the place of AccelpatchConfig until a checkpoint asks for it."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """The AccelpatchConfig of a config.json."""
        return importlib.import_module("accelpatch.hf").AccelpatchConfig.from_dict(config_dict, **options)


def quantizer(config: Any, **options: Any) -> Any:
    """The quantizer of such a configuration."""
    return importlib.import_module("accelpatch.hf").AccelpatchQuantizer(config, **options)


def enter(module: ModuleType) -> None:
    """Enter both into the tables of `transformers.quantizers.auto`."""
    getattr(module, CONFIGS).setdefault(METHOD, Config)
    getattr(module, QUANTIZERS).setdefault(METHOD, quantizer)


class Finder(MetaPathFinder):
    """Finds that one module in its package's folder, as Python does, and enters ours once it has run. It stays, since
    the module may be imported again, after an error or by importlib.reload."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != HOME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_enter(module: ModuleType) -> None:
                run(module)
                enter(module)

            loader.exec_module = run_and_enter
        return spec


def register() -> None:
    """Do so now, and whenever transformers is imported."""
    names = [(type(finder).__module__, type(finder).__name__) for finder in sys.meta_path]
    if (__name__, Finder.__name__) not in names:  # by name: this module may be imported again too
        sys.meta_path.insert(0, Finder())
    if HOME in sys.modules:
        module = importlib.import_module(HOME)  # waits for another thread that imports it now
        if hasattr(module, QUANTIZERS):
            enter(module)
