"""What a GGUF file's metadata says of the computation: read into the configuration, or refused.

transformers reads a part of it. KEYS says of each key under the architecture's prefix whether a configuration holds it,
with which values it changes nothing, or that it is of no bearing. A key that the table does not know is refused too,
unless its value is nothing (0, false, empty), for a writer puts there what describes the architecture. Keys elsewhere
(general.*, tokenizer.*, quantize.*, a tool's own) describe no computation.
Source: https://github.com/ggml-org/ggml, docs/gguf.md; the names are those of gguf-py's constants.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError
from accelpatch.models import gguf_rotary
from accelpatch.models.gguf_header import Header, Metadata, same
from accelpatch.models.gguf_keys import DERIVED, EPSILONS, HEADS, KEYS, LAYERS_OF_27B, OPTIONAL, OWN_HEADS, PARTIAL, Key

MERGE = "merge its parts first (llama-gguf-split --merge)"


def completed(config: Any, header: Header, path: Path) -> Any:
    """The configuration that transformers made of a file, with what it leaves out of the metadata.

    Raises LoadError, which names the key, for what the configuration cannot hold.
    """
    file = Metadata(path, header)
    _check_whole(header, path)
    _heads(config, file)
    for name, value in file.facts.items():
        key = KEYS.get(name, Key())
        if file.of(key.of):
            _put(config, key.attribute, value, name, file)
        elif not key.read and not _changes_nothing(name, value, key, config, file):
            file.refuse(name)
    _epsilon(config, file)
    _pattern(config, file)
    gguf_rotary.complete(config, file)
    return config


def _check_whole(header: Header, path: Path) -> None:
    """Raise LoadError for a file that is no model, or a part of one."""
    kind, parts = header.values.get("general.type", "model"), header.values.get("split.count", 1)
    if kind != "model":
        raise LoadError(f"{path} is no model but of the type {kind!r} (general.type): give the model's own file")
    if type(parts) is int and parts > 1:
        raise LoadError(f"{path} is one of {parts} parts (split.count): {MERGE}")


def _changes_nothing(name: str, value: Any, key: Key, config: Any, file: Metadata) -> bool:
    if isinstance(value, list):
        return all(_changes_nothing(name, one, key, config, file) for one in value)
    if name == "attention.sliding_window" and isinstance(value, int):
        return value == 0 or value >= file.number("context_length", math.inf)
    if name == "attention.scale" and isinstance(value, float):
        width = getattr(config, "query_pre_attn_scalar", None) or _head_width(config, file)
        return value == 0 or (bool(width) and same(value, width**-0.5))
    return value in key.neutral


def _put(config: Any, attribute: str, value: Any, name: str, file: Metadata) -> None:
    """Set what differs, where the configuration has it; what has none is shown by the tensors' shapes."""
    value = None if value == 0 and attribute in OPTIONAL else value
    if not attribute or not hasattr(config, attribute) or same(getattr(config, attribute), value):
        return
    if attribute in DERIVED or isinstance(value, (list, str)):
        file.refuse(name)
    setattr(config, attribute, value)


def _head_width(config: Any, file: Metadata) -> int:
    """Values in an attention head; 0 for a model without any, or with several widths."""
    heads = getattr(config, "num_attention_heads", 0)
    if file.of(OWN_HEADS) or not isinstance(heads, int) or heads < 1:
        return 0
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _heads(config: Any, file: Metadata) -> None:
    """The width of a head, and of its part that is rotated."""
    if not _head_width(config, file):
        return
    width = int(file.number("attention.key_length", config.hidden_size // config.num_attention_heads))
    if width != _head_width(config, file):
        if not file.of(HEADS):
            file.refuse("attention.key_length")
        config.head_dim = width
    if file.architecture in LAYERS_OF_27B:
        large = config.num_hidden_layers == LAYERS_OF_27B[file.architecture]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else width
    rotary = getattr(config, "rope_parameters", None)
    if not rotary:
        return
    rotated = int(file.number("rope.dimension_count", int(width * rotary.get("partial_rotary_factor", 1.0))))
    if rotated == int(width * rotary.get("partial_rotary_factor", 1.0)):
        return
    if not file.of(PARTIAL) or not 0 < rotated <= width:
        file.refuse("rope.dimension_count")
    rotary["partial_rotary_factor"] = rotated / width
    if hasattr(config, "partial_rotary_factor"):
        config.partial_rotary_factor = rotated / width


def _epsilon(config: Any, file: Metadata) -> None:
    named = [name for name in EPSILONS if hasattr(config, name)]
    given = [name for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon") if f"attention.{name}" in file.facts]
    if named and given:
        _put(config, named[0], file.number(f"attention.{given[0]}", 0.0), given[0], file)


def _pattern(config: Any, file: Metadata) -> None:
    """Raise LoadError where other layers have a sliding window than the configuration says."""
    name = "attention.sliding_window_pattern"
    given, layers = file.facts.get(name), getattr(config, "layer_types", None)
    if not given or (isinstance(given, list) and not any(given)):
        return
    if layers is None:
        file.refuse(name)
    sliding = [kind == "sliding_attention" for kind in layers]
    period = given if type(given) is int else 0
    if (given if not period else [(layer + 1) % period != 0 for layer in range(len(layers))]) != sliding:
        file.refuse(name)
