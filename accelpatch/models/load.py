"""Loads models and tokenizers; the only module that calls ``from_pretrained``.

Safetensors and GGUF only. Nothing in a checkpoint can run code, and weights that do not fit the configuration are an
error; transformers would start them at random.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, replace
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
from accelpatch.models.guard import explained, quiet
from accelpatch.models.precheck import check_gguf

TOKENIZER, BEGINNING = b"tokenizer.ggml.model", 1 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its tokenizer (None where the checkpoint has none) and their source."""

    model: nn.Module
    tokenizer: Any
    source: Source


@dataclass(frozen=True)
class Wanted:
    """How a model is loaded; see `load`."""

    dtype: str | torch.dtype
    device: str | torch.device
    progress: Progress


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
    source, wanted = resolve(name), Wanted(dtype, device, progress or silent)
    if source.kind == "gguf":
        path, config = Path(source.location), _config(source)
        if floats is None:
            model = _unpacked(path, config, wanted)
        else:  # whose quantised weights `quantization` reads from the file; "auto" is float32
            wanted = replace(wanted, dtype=torch.float32 if dtype == "auto" else dtype)
            options = {"state_dict": dict(floats), "quantization_config": quantization}
            model = _pretrained(path, None, model_class(config), wanted, config=config, **options)
        return Loaded(model, _tokenizer_of(source, wanted.progress), source)
    folder = folder_of(source, wanted.progress)
    model = _load_folder(folder, wanted, quantization)
    return Loaded(model, _folder_tokenizer(folder), source)


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


def is_patched(name: str) -> bool:
    """Whether a name is that of a folder with a saved patched model."""
    source = resolve(name)
    if source.kind != "folder" or not (Path(source.location) / "config.json").is_file():
        return False
    config = checkpoint.read_json(Path(source.location) / "config.json")
    return checkpoint.quantization_method(config) == checkpoint.OWN


def gguf_file(name: str, progress: Progress | None = None) -> Path | None:
    """The GGUF file of a model, where it has one and no other weights; that of the embedded model is fetched."""
    source, report = resolve(name), progress or silent
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


def _tokenizer_of(source: Source, progress: Progress) -> Any:
    """The tokenizer of a GGUF file: that in its folder, where that was given, else its own."""
    path = Path(source.location)
    if source.from_folder and (found := _folder_tokenizer(path.parent, _config(source))) is not None:
        return found
    with path.open("rb") as file:
        has_own = TOKENIZER in file.read(BEGINNING)  # where metadata names it, before the words
    return _gguf_tokenizer(path, progress) if has_own else None


def silent(stage: str, done: int, total: int) -> None:
    """A progress function that does nothing."""


def folder_of(source: Source, progress: Progress) -> Path:
    """The folder of a model's files, which are fetched where they are not here."""
    if source.kind == "embedded":
        return embedded.folder(lambda gguf, target: _convert(gguf, target, progress), progress)
    if source.kind == "hub":
        progress("downloading", 0, 1)
        folder = hub.snapshot(source.location)
        progress("downloading", 1, 1)
        return folder
    return Path(source.location)


def _config(source: Source) -> Any:
    if source.config is not None:
        return native(dict(source.config), source.name)
    if source.kind == "gguf":
        path = Path(source.location)
        own_config = source.from_folder and (path.parent / "config.json").is_file()
        return gguf.folder_configuration(path) if own_config else _gguf_config(path)
    folder = hub.local(source.location, weights=False) if source.kind == "hub" else Path(source.location)
    if folder is None:
        raise LoadError(f"{source.name}: its configuration is not here; give a folder, or load it once from the hub")
    return native(checkpoint.read_config(folder), str(folder))


def _pretrained(
    place: Path, name: Path | None, made_by: Any, wanted: Wanted, stage: str = "loading", why: str = "cannot be loaded",
    **options: Any,
) -> Any:  # fmt: skip
    """`from_pretrained(name)` of a model class, on nothing but local files. Raises LoadError, which begins with the
    place and says why it failed, also where the weights are not those of the configuration."""
    wanted.progress(stage, 0, 1)
    file, device = "gguf_file" in options, torch.device(wanted.device)  # a file has a bar of its own, on stderr
    with explained(f"{place} {why}"), quiet(), redirect_stderr(io.StringIO()) if file else nullcontext():
        model, info = made_by.from_pretrained(
            name,
            dtype=wanted.dtype,
            device_map=None if device.type == "cpu" else {"": device},
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=not file,  # reported in info, which check_complete turns into an error
            output_loading_info=True,
            **options,
        )
    checkpoint.check_complete(str(place), info)
    wanted.progress(stage, 1, 1)
    return model.eval()


def _load_folder(folder: Path, wanted: Wanted, quantization: Any) -> Any:
    config = native(checkpoint.read_config(folder, foreign=isinstance(quantization, dict)), str(folder))
    if isinstance(quantization, dict):
        config.quantization_config, quantization = quantization, None
    checkpoint.check_weights(folder, wanted.progress)
    if (folder / "generation_config.json").exists():
        checkpoint.read_json(folder / "generation_config.json")
    options = {} if quantization is None else {"quantization_config": quantization}
    return _pretrained(folder, folder, model_class(config), wanted, config=config, use_safetensors=True, **options)


def _gguf_config(path: Path) -> Any:
    """The configuration in a file's metadata. Raises LoadError for what changes the computation and cannot be read."""
    check_gguf(path)
    with explained(f"{path} is no GGUF file that transformers can read"), quiet():
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    return completed(config, read_header(path), path)


def _unpacked(path: Path, config: Any, wanted: Wanted) -> Any:
    """The model with all weights as floats. Raises LoadError, as the other functions here do."""
    gguf.check_places(config, path)
    options: dict[str, Any] = {"config": config, "gguf_file": path.name}
    # Newer versions would keep the blocks and fetch kernels for them; the oldest always unpacks.
    if (gguf_config := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = gguf_config(dequantize=True)
    why = "is damaged, or of a kind that transformers cannot read"
    model = _pretrained(path, path.parent, AutoModelForCausalLM, wanted, "unpacking", why, **options)
    gguf.forget_quantizer(model)
    return model


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
    model = _unpacked(file, _gguf_config(file), Wanted(torch.float32, "cpu", progress))
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


def _folder_tokenizer(folder: Path, config: Any = None) -> Any:
    present = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        return None
    for name in present:
        if name.endswith(".json"):
            checkpoint.read_json(folder / name)
    config = config or native(checkpoint.read_config(folder, foreign=True), str(folder))
    with explained(f"{folder} has no tokenizer that transformers can read"):
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, local_files_only=True)
