"""transformers' own configuration and model classes for a checkpoint; none is run that comes with one."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModel, AutoModelForCausalLM

from accelpatch.errors import LoadError
from accelpatch.models.guard import explained


def native(config: dict[str, Any], place: str) -> Any:
    """The configuration that a config.json is. Raises LoadError where transformers has none of its own for it."""
    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise LoadError(
            f"{place}: transformers {transformers.__version__} has no model_type {kind!r} of its own, and code that "
            "comes with a checkpoint is not run: install a transformers that knows the model"
        )
    with explained(f"{place}: its configuration does not fit model_type {kind!r}"):
        return transformers.CONFIG_MAPPING[kind].from_dict(config)


def model_class(config: Any) -> Any:
    """The configuration's model class if it is one of transformers' own, else the auto class for its kind."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and getattr(named, "config_class", None) is type(config):
            return named
    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise LoadError(f"transformers has no model class for {type(config).__name__}")
