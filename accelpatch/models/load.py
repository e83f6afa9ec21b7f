"""Loads models and tokenizers; the only module that calls ``from_pretrained``.

Safetensors and GGUF only. Nothing in a checkpoint can run code, and weights that do not fit the configuration are an
error; transformers would start them at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from accelpatch.errors import CacheError, LoadError
from accelpatch.models import checkpoint, embedded, gguf, hub
from accelpatch.models.catalog import Source, resolve
from accelpatch.models.checkpoint import Progress
from accelpatch.models.configuration import model_class, native
from accelpatch.models.gguf_header import read_header
from accelpatch.models.gguf_metadata import completed
from accelpatch.models.guard import explained, no_bar, quiet
from accelpatch.models.precheck import check_gguf

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its tokenizer (None where the checkpoint has none) and their source."""

    model: nn.Module
    tokenizer: Any
    source: Source


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    quantization: Any = None,
    floats: Mapping[str, torch.Tensor] | None = None,
) -> Loaded:
    """Load a model by short name, folder, GGUF file or hub name.

    dtype: "auto" keeps the checkpoint's. quantization: transformers' quantization_config for a float checkpoint; a dict
    is taken as the one in config.json. floats: the float tensors of a GGUF file whose others `quantization` reads.
    progress: called as ``progress(stage, done, total)``. Raises LoadError, which says what to do, for a wrong name,
    network failures, and files that are damaged or not trusted.
    """
    report = progress or _silent
    source = resolve(name)
    if source.kind == "gguf":
        path = Path(source.location)
        config = _config(source)
        if floats is None:
            model = _unpacked(path, config, dtype, device, report)
        else:
            model = _as_stored(path, config, quantization, floats, dtype, device, report)
        return Loaded(model, _tokenizer_of(source, report, required=False), source)
    folder = _folder(source, report)
    model = _load_folder(folder, dtype, device, report, quantization)
    return Loaded(model, _folder_tokenizer(folder, required=False), source)


def from_config(name: str) -> nn.Module:
    """The model on the meta device, without weights, from a built-in or local configuration. Uses no network."""
    source = resolve(name)
    config = _config(source)
    with explained(f"{name}: no model can be made from its configuration"), torch.device("meta"):
        return model_class(config)._from_config(config).eval()


def random(
    name: str, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", seed: int = 0
) -> nn.Module:
    """The model with seeded random weights, initialised as transformers does. Uses no network."""
    config = _config(resolve(name))
    kind = torch.device(device)
    options = {} if dtype == "auto" else {"dtype": dtype}
    with torch.random.fork_rng([kind] if kind.type != "cpu" else [], device_type=kind.type), kind:
        torch.manual_seed(seed)
        with explained(f"{name}: no model can be made from its configuration"):
            return model_class(config)._from_config(config, **options).eval()


def tokenizer(name: str) -> Any:
    """The model's tokenizer with its chat template. Raises LoadError where it has none."""
    source = resolve(name)
    if source.kind == "gguf":
        return _tokenizer_of(source, _silent)
    return _folder_tokenizer(_folder(source, _silent, weights=False), required=True)


def is_patched(name: str) -> bool:
    """Whether a name is that of a folder with a saved patched model."""
    source = resolve(name)
    if source.kind != "folder" or not (Path(source.location) / "config.json").is_file():
        return False
    config = checkpoint.read_json(Path(source.location) / "config.json")
    return checkpoint.quantization_method(config) == checkpoint.OWN


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """Download the model's files; returns the path of its folder or GGUF file."""
    source = resolve(name)
    return Path(source.location) if source.kind == "gguf" else _folder(source, progress or _silent)


def gguf_file(name: str, progress: Progress | None = None) -> Path | None:
    """The GGUF file of a model, where it has one and no other weights; that of the embedded model is fetched."""
    source, report = resolve(name), progress or _silent
    if source.kind == "embedded":
        folder = embedded.gguf(lambda file, target: _describe(file, target, report), report)
        return next(folder.glob("*.gguf"))
    return Path(source.location) if source.kind == "gguf" else None


def _describe(file: Path, target: Path, progress: Progress) -> None:
    """Write the configuration and the tokenizer of a GGUF file, which take long to read from it."""
    config = _gguf_config(file)
    config.architectures = [model_class(config).__name__]
    config.save_pretrained(target)
    _gguf_tokenizer(file, progress).save_pretrained(target)


def _tokenizer_of(source: Source, progress: Progress, *, required: bool = True) -> Any:
    """The tokenizer of a GGUF file: that in its folder, where that was given, else its own."""
    path = Path(source.location)
    if source.beside and (found := _folder_tokenizer(path.parent, required=False, config=_config(source))) is not None:
        return found
    return _gguf_tokenizer(path, progress) if required or gguf.has_tokenizer(path) else None


def _silent(stage: str, done: int, total: int) -> None:
    """A progress function that does nothing."""


def _folder(source: Source, progress: Progress, *, weights: bool = True) -> Path:
    if source.kind == "embedded":
        return embedded.folder(lambda gguf, target: _convert(gguf, target, progress), progress)
    if source.kind == "hub":
        progress("downloading", 0, 1)
        folder = hub.snapshot(source.location, weights=weights)
        progress("downloading", 1, 1)
        return folder
    return Path(source.location)


def _config(source: Source) -> Any:
    if source.config is not None:
        return native(dict(source.config), source.name)
    if source.kind == "gguf":
        path = Path(source.location)
        beside = source.beside and (path.parent / "config.json").is_file()
        return gguf.configuration_beside(path) if beside else _gguf_config(path)
    folder = hub.local(source.location, weights=False) if source.kind == "hub" else Path(source.location)
    if folder is None:
        raise LoadError(f"{source.name}: its configuration is not here; give a folder, or load it once from the hub")
    return native(checkpoint.read_config(folder), str(folder))


def _load_folder(
    folder: Path, dtype: str | torch.dtype, device: str | torch.device, progress: Progress, quantization: Any = None
) -> Any:
    config = native(checkpoint.read_config(folder, foreign=isinstance(quantization, dict)), str(folder))
    if isinstance(quantization, dict):
        config.quantization_config, quantization = quantization, None
    checkpoint.check_weights(folder, progress)
    if (folder / "generation_config.json").exists():
        checkpoint.read_json(folder / "generation_config.json")
    made_by = model_class(config)
    progress("loading", 0, 1)
    with explained(f"{folder} cannot be loaded"), quiet():
        model, info = made_by.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=gguf.device_map_of(device),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported in info, which check_complete turns into an error
            output_loading_info=True,
            **({} if quantization is None else {"quantization_config": quantization}),
        )
    checkpoint.check_complete(str(folder), info)
    progress("loading", 1, 1)
    return model.eval()


def _gguf_config(path: Path) -> Any:
    """The configuration in a file's metadata. Raises LoadError for what changes the computation and cannot be read."""
    check_gguf(path)
    with explained(f"{path} is no GGUF file that transformers can read"), quiet():
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    return completed(config, read_header(path), path)


def _unpacked(path: Path, config: Any, dtype: str | torch.dtype, device: str | torch.device, progress: Progress) -> Any:
    """The model with all weights as floats. Raises LoadError, as the other functions here do."""
    gguf.check_places(config, path)
    options: dict[str, Any] = {"config": config}
    # Newer versions would keep the blocks and fetch kernels for them; the oldest always unpacks.
    if (gguf_config := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = gguf_config(dequantize=True)
    progress("unpacking", 0, 1)
    with explained(f"{path} is damaged, or of a kind that transformers cannot read"), quiet(), no_bar():
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            device_map=gguf.device_map_of(device),
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    checkpoint.check_complete(str(path), info)
    gguf.forget_quantizer(model)
    progress("unpacking", 1, 1)
    return model.eval()


def _as_stored(
    path: Path, config: Any, quantization: Any, floats: Mapping[str, torch.Tensor],
    dtype: str | torch.dtype, device: str | torch.device, progress: Progress,
) -> Any:  # fmt: skip
    """The model whose quantised weights `quantization` reads from the file, as floats in `dtype` ("auto": float32)."""
    progress("loading", 0, 1)
    with explained(f"{path} cannot be loaded"), quiet():
        model, info = model_class(config).from_pretrained(
            None,
            config=config,
            state_dict=dict(floats),
            dtype=torch.float32 if dtype == "auto" else dtype,
            device_map=gguf.device_map_of(device),
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported in info, which check_complete turns into an error
            output_loading_info=True,
            quantization_config=quantization,
        )
    checkpoint.check_complete(str(path), info)
    progress("loading", 1, 1)
    return model.eval()


def _gguf_tokenizer(path: Path, progress: Progress) -> Any:
    """The tokenizer in a file's metadata."""
    check_gguf(path)
    progress("reading the tokenizer", 0, 1)
    with explained(f"{path} has no tokenizer that transformers can read"), quiet():
        found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    progress("reading the tokenizer", 1, 1)
    return found


def _convert(file: Path, target: Path, progress: Progress) -> None:
    # float32 holds the unpacked values exactly; bfloat16 would round them once more.
    model = _unpacked(file, _gguf_config(file), torch.float32, "cpu", progress)
    progress("converting", 0, 1)
    try:
        with quiet():
            model.save_pretrained(target)
    except SafetensorError as error:
        raise CacheError(
            f"{target.parent} cannot be written ({error}): free some space there, or set ACCELPATCH_CACHE "
            "to another folder"
        ) from error
    _gguf_tokenizer(file, progress).save_pretrained(target)
    checkpoint.write_checksums(target)
    progress("converting", 1, 1)


def _folder_tokenizer(folder: Path, *, required: bool, config: Any = None) -> Any:
    present = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        if required:
            raise LoadError(f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
        return None
    for name in present:
        if name.endswith(".json"):
            checkpoint.read_json(folder / name)
    config = config or native(checkpoint.read_config(folder, foreign=True), str(folder))
    with explained(f"{folder} has no tokenizer that transformers can read"):
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, local_files_only=True)
