"""What a checkpoint is, read off its configuration and headers: no weight is read, and torch is not loaded.

Formats: safetensors (https://github.com/huggingface/safetensors), GGUF (models/gguf_header.py).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError
from accelpatch.models.checkpoint import DTYPES, OWN, Described, header, quantization_of
from accelpatch.models.foreign_layouts import METHODS
from accelpatch.models.gguf_header import TYPES, read_header
from accelpatch.models.unread import FLOAT, reason

FOUR_BITS = ("int4", "nf4", "fp4", "mxfp4", "nvfp4")  # how the names of replacers with two codes a byte begin
PARTS = ("q", "scale", "offset")
OF_OPT = "self_attn.qk_bmm.a"  # a tensor that only SmoothQuant's OPT has
RECIPE_RUN = "float weights: `accelpatch run {place} --recipe int8` quantises them while they load"
GENERATING = ("ForCausalLM", "LMHeadModel")  # ends of the names of classes that `run` takes
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass
class Inspection:
    """What a checkpoint is. facts: name -> value, for people. kinds: dtype or block type -> (tensors, bytes)."""

    place: str
    format: str
    facts: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        kinds = {kind: {"tensors": count, "bytes": size} for kind, (count, size) in self.kinds.items()}
        return {"place": self.place, "format": self.format, **self.facts, "kinds": kinds, "advice": self.advice}


def inspect(place: Path) -> Inspection:
    """Inspect a checkpoint's folder, a safetensors file or a GGUF file. Raises LoadError, which names the file."""
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        raise LoadError(f"{place}: no such file or folder")
    if place.suffix == ".gguf":
        return _gguf(place)
    if place.suffix == ".safetensors":
        return _tensors(str(place), [place], {})
    if place.suffix in PICKLES:
        raise LoadError(f"{place} holds pickled weights, which can run code while they load: it is not opened")
    raise LoadError(f"{place} is no .safetensors or .gguf file, and no folder")


def _folder(folder: Path) -> Inspection:
    files = sorted(folder.glob("*.safetensors"))
    ggufs = sorted(folder.glob("*.gguf"))
    if not files and ggufs:
        return _gguf(ggufs[0])
    if not files:
        pickled = [path for path in folder.iterdir() if path.suffix in PICKLES]
        why = "only pickled weights, which can run code while they load" if pickled else "no weights (*.safetensors)"
        raise LoadError(f"{folder} has {why}")
    if (index := folder / "model.safetensors.index.json").is_file():
        listed = _json(index).get("weight_map")
        names = set(listed.values()) if isinstance(listed, dict) else set()
        if lacking := sorted(str(name) for name in names if not isinstance(name, str) or not (folder / name).is_file()):
            raise LoadError(f"{folder} lacks {lacking[0]}, which its index names: fetch it again")
        files = [file for file in files if file.name in names]
    return _tensors(str(folder), files, _json(folder / "config.json") if (folder / "config.json").is_file() else {})


def _tensors(place: str, files: list[Path], config: dict[str, Any]) -> Inspection:
    sites: dict[str, str] = {}
    found: dict[str, Described] = {}
    for file in files:
        metadata, tensors = header(file, "fetch it again")
        found |= tensors
        sites |= _sites(file, metadata)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    facts = {"architecture": ", ".join(map(str, config.get("architectures") or ())) or "unknown (no config.json)"}
    facts |= {"files": str(len(files)), "tensors": str(len(found))}
    if config:
        tied = bool(config.get("tie_word_embeddings", (text or {}).get("tie_word_embeddings", False)))
        facts["tied"] = "input and output embeddings" if tied else "none"
    name, more, advice = _format(place, config, found, sites)
    by_kind = _by_kind((dtype, math.prod(shape) * _bytes(dtype)) for dtype, shape in found.values())
    return Inspection(place, name, facts | more, by_kind, advice)


def _bytes(dtype: str) -> int:
    """Bytes of a value."""
    bits = re.search(r"\d+", DTYPES.get(dtype, ""))
    return int(bits[0]) // 8 if bits else 1


def _by_kind(sizes: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Kind of a tensor -> (tensors, bytes), the largest first, from each tensor's."""
    found: dict[str, tuple[int, int]] = {}
    for kind, size in sizes:
        count, total = found.get(kind, (0, 0))
        found[kind] = (count + 1, total + size)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _format(
    place: str, config: dict[str, Any], found: dict[str, Described], sites: dict[str, str]
) -> tuple[str, dict[str, str], str]:
    """(format, facts about it, what accelpatch would do)."""
    quantization = quantization_of(config)
    if not quantization:
        if layers := sum(name.endswith(OF_OPT) for name in found):
            advice = f"`accelpatch run {place}` loads it as it is"
            return "int8 OPT of SmoothQuant", {"quantised": f"{layers} layers"}, advice
        return "float, safetensors", {}, RECIPE_RUN.format(place=place)
    method = str(quantization.get("quant_method", "unknown"))
    if method != OWN:
        keys = ("bits", "group_size", "desc_act", "sym")
        facts = {key: str(quantization[key]) for key in keys if key in quantization}
        facts |= {"packing": str(quantization["format"])} if "format" in quantization else {}
        advice = f"{method} checkpoints are not read: {FLOAT}"
        if method in METHODS:
            advice = f"`accelpatch run {place}` loads it as it is"
        advice = reason(quantization) or advice
        return method, facts, advice
    shapes = {name: list(shape) for name, (_, shape) in found.items()}
    whole = Counter(replacer for path, replacer in sites.items() if f"{path}.{OF_OPT}" in shapes)
    sites = {path: replacer for path, replacer in sites.items() if f"{path}.{OF_OPT}" not in shapes}
    forms = whole + Counter(
        _form(replacer, *(shapes.get(f"{path}.{part}", shapes.get(f"{path}.gate_up_proj_{part}")) for part in PARTS))
        for path, replacer in sites.items()
    )
    first = str(quantization.get("recipe", "")).partition("\n")[0].removeprefix("name: ")
    facts = {"version": str(quantization.get("version")), "recipe": first}
    facts["quantised"] = ", ".join(f"{count} x {form}" for form, count in forms.most_common()) or "none"
    generates = any(str(name).endswith(GENERATING) for name in config.get("architectures") or ())
    return OWN, facts, f"`{'accelpatch run' if generates else 'accelpatch.load of'} {place}` loads it as it is"


def _form(replacer: str, q: list[int] | None, scale: list[int] | None, offset: list[int] | None) -> str:
    """A quantised weight's format in words; of experts that of their gates and ups."""
    if q is None or scale is None or len(q) not in (2, 3) or len(scale) != len(q) or not scale[-1]:
        return f"{replacer}, damaged"
    group = q[-1] * (2 if replacer.startswith(FOUR_BITS) else 1) // scale[-1]
    form = "rows" if scale[-1] == 1 else f"groups of {group}"
    return f"{replacer} in {form}" + (" with minima" if offset is not None else "")


def _sites(file: Path, metadata: dict[str, str]) -> dict[str, str]:
    if OWN not in metadata:
        return {}
    try:
        sites = json.loads(metadata[OWN])["sites"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{file}: its header is damaged ({error}): fetch it again") from error
    return {str(path): str(name) for path, name in sites.items()} if isinstance(sites, dict) else {}


def _gguf(file: Path) -> Inspection:
    head = read_header(file)
    typed = [(*TYPES.get(kind, (f"type {kind}", 1, 0)), math.prod(shape)) for _, kind, shape in head.tensors]
    names = {name for name, _, _ in head.tensors}
    facts = {"architecture": str(head.values.get("general.architecture", "unknown")), "version": str(head.version)}
    facts |= {"files": "1", "tensors": str(len(head.tensors))}
    facts["tied"] = "none" if "output.weight" in names else "input and output embeddings"
    by_kind = _by_kind((name, values // block * size) for name, block, size, values in typed)
    advice = f"`accelpatch run {file}` holds its blocks as they are; another recipe than gguf unpacks them to float"
    return Inspection(str(file), "GGUF", facts, by_kind, advice)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise LoadError(f"{path}: not JSON ({error}): fetch it again") from error
    if not isinstance(found, dict):
        raise LoadError(f"{path}: a JSON object is expected, and this is a {type(found).__name__}")
    return found
