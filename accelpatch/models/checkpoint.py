"""Checks a checkpoint's folder before anything is loaded: nothing in it may run or download code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from accelpatch.errors import LoadError
from accelpatch.models import unread
from accelpatch.models.catalog import pickle_refusal
from accelpatch.models.foreign_layouts import METHODS

CHECKSUMS = "SHA256SUMS"
OWN = "accelpatch"  # quant_method of saved patched models
#: a tensor's dtype in safetensors' words -> in torch's
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
QUANTIZATION = ("quantization_config", "compression_config")  # the second as compressed-tensors wrote it at first
#: files next to config.json that described a quantisation before config.json itself did
SEPARATE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
Progress = Callable[[str, int, int], None]
Described = tuple[str, tuple[int, ...]]  # of a tensor: its dtype in safetensors' words, such as F16, and its shape
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Configuration keys that make transformers choose, fetch or run code by a name from the file; at any depth.
_UNTRUSTED_KEYS = frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "distributed_config",
        "experts_implementation",
        "fusion_config",
        "kernel_config",
        "transformers_weights",
        "use_kernels",
    )
)


def read_config(folder: Path, *, foreign: bool = False) -> dict[str, Any]:
    """The folder's config.json, without the keys that could run or download code.

    foreign: whether one that others quantised will do, where it is read as it is. Raises LoadError for a folder that is
    not a float checkpoint: empty, an adapter, already quantised, or not JSON.
    """
    if not folder.is_dir():
        raise LoadError(f"{folder}: no such folder")
    if (folder / "adapter_config.json").exists():
        raise LoadError(
            f"{folder} is an adapter: run its model with --adapter {folder}, or make a whole one by accelpatch merge"
        )
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        advice = f"give the file itself: {folder / ggufs[0]}" if ggufs else "a checkpoint's folder has one"
        raise LoadError(f"{folder} has no config.json: {advice}")
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise LoadError(f'{folder / "config.json"} does not say its model_type: add it, for example "llama"')
    if (method := quantization_method(config)) in METHODS and foreign:
        for part in _parts(config):
            for key in QUANTIZATION:
                part.pop(key, None)  # what loads it says it anew
    elif method not in (None, OWN):
        as_it_is = ", or load it from a folder as it is, without a recipe" if method in METHODS else ""
        advice = unread.reason(quantization_of(config)) or f"{unread.FLOAT}{as_it_is}"
        raise LoadError(f"{folder} is quantised already ({method}): {advice}")
    return _trusted(config)


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and that of its language part."""
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, dict) else [config]


def quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of a checkpoint's quantisation; empty for a float one."""
    found: Any = next((one for part in _parts(config) for key in QUANTIZATION if (one := part.get(key))), {})
    return found if isinstance(found, dict) else {"quant_method": "unknown"}


def quantization_method(config: dict[str, Any]) -> str | None:
    """How a checkpoint is quantised, by its config.json; None for a float one."""
    found = quantization_of(config)
    return str(found.get("quant_method", "unknown")) if found else None


def _trusted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _trusted(item) for key, item in value.items() if key not in _UNTRUSTED_KEYS}
    return [_trusted(item) for item in value] if isinstance(value, list) else value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; LoadError, with line and column, where the file does not hold one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise LoadError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg}): fetch the file again") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path}: not JSON ({error}): fetch the file again") from error
    if not isinstance(found, dict):
        raise LoadError(f"{path}: a JSON object is expected, and this is a {type(found).__name__}")
    return found


def shard_names(folder: Path) -> list[str]:
    """The weight files listed in the folder's safetensors index; empty where it has no safetensors."""
    if not (folder / _INDEX).is_file():
        return [_SINGLE] if (folder / _SINGLE).is_file() else []
    return sorted(set(_weight_map(folder).values()))


def _weight_map(folder: Path) -> dict[str, str]:
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise LoadError(f"{folder / _INDEX} has no weight_map: fetch the file again")
    for name in set(places.values()):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise LoadError(f"{folder / _INDEX} names {name!r}, which is no safetensors file beside it")
    return places


def check_weights(folder: Path, progress: Progress) -> None:
    """Check that all weight files are there, complete and as the index says; compare checksums where there are any."""
    shards = shard_names(folder)
    if not shards:
        pickles = [path for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern)]
        raise LoadError(pickle_refusal(str(folder)) if pickles else f"{folder} has no weights (*.safetensors)")
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise LoadError(f"{folder} lacks {', '.join(missing)}: fetch the missing files")
    places = _weight_map(folder) if (folder / _INDEX).is_file() else {}
    for name in shards:
        keys = header(folder / name)[1]
        absent = sorted(key for key, place in places.items() if place == name and key not in keys)
        if absent:
            raise LoadError(f"{folder / name} lacks {_some(absent)}, which the index says it holds")
    _compare_checksums(folder, progress)


def header(path: Path, advice: str = "fetch the file again") -> tuple[dict[str, str], dict[str, Described]]:
    """(metadata, name of a tensor -> its dtype and shape) of a safetensors file. Loads no torch.

    Raises LoadError for one that is truncated or damaged. advice: what to do then.
    """
    try:
        # Reads the header alone, and refuses a file that is not exactly as long as the header says.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            tensors = {name: (str(one.get_dtype()), tuple(one.get_shape())) for name, one in slices.items()}
            return dict(file.metadata() or {}), tensors
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is truncated or damaged ({error}): {advice}") from error


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every weight file, in the format of sha256sum."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in shard_names(folder)]
    (folder / CHECKSUMS).write_text("".join(lines))


def _compare_checksums(folder: Path, progress: Progress) -> None:
    if not (folder / CHECKSUMS).is_file():
        return
    lines = [line.split(maxsplit=1) for line in (folder / CHECKSUMS).read_text(errors="replace").splitlines()]
    expected = {parts[1].lstrip("*"): parts[0] for parts in lines if len(parts) == 2}
    shards = [name for name in shard_names(folder) if name in expected]
    for done, name in enumerate(shards):
        progress("checking", done, len(shards))
        if sha256(folder / name) != expected[name].lower():
            raise LoadError(
                f"{folder / name} is not the file whose SHA-256 stands in {CHECKSUMS}: fetch it again "
                "(or run `accelpatch cache clear` where it lies in accelpatch's cache)"
            )
    progress("checking", len(shards), len(shards))


def check_complete(place: str, info: dict[str, Any]) -> None:
    """Raise LoadError where weights and configuration disagree. info: transformers' loading info.

    transformers would initialise missing weights at random and drop unexpected ones.
    """
    mismatched = [f"{key} {tuple(found)} for {tuple(wanted)}" for key, found, wanted in info["mismatched_keys"]]
    complaints = [
        f"{what}: {_some(sorted(keys))}"
        for what, keys in (
            ("missing", info["missing_keys"]),
            ("not in the model", info["unexpected_keys"]),
            ("of another shape", mismatched),
            ("unreadable", info["error_msgs"]),
        )
        if keys
    ]
    if complaints:
        said = [name for name in SEPARATE if (Path(place) / name).is_file()]
        hint = f": {said[0]} says that they are quantised, and config.json does not: {unread.FLOAT}" if said else ""
        raise LoadError(f"{place}: config.json and the weights disagree; weights {'; '.join(complaints)}{hint}")


def _some(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
