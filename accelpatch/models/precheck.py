"""What is known of a model before anything is loaded: whether it is there, and its context length. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError
from accelpatch.models import checkpoint
from accelpatch.models.catalog import Source, resolve
from accelpatch.models.gguf_header import Metadata, read_header

#: of PEFT
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: the keys of config.json for the context length; gpt2 and its like have the second
CONTEXT = ("max_position_embeddings", "n_positions")


def check(name: str) -> Source:
    """The source of a model. Raises LoadError for a name, path, folder or GGUF file that is none."""
    source = resolve(name)
    if source.kind == "folder":
        checkpoint.read_config(Path(source.location), foreign=True)
    elif source.kind == "gguf":
        check_gguf(Path(source.location))
    return source


def check_gguf(path: Path) -> None:
    """Raise LoadError for a file that does not begin as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} does not begin as a GGUF file does: fetch it again")


def check_fetched(source: Source) -> None:
    """Raise LoadError for a model of the hub of which no whole copy is here, where the hub cannot be reached."""
    if source.kind == "hub":
        from accelpatch.models import hub  # whose client takes a while to import

        hub.complete(source.location)


def is_quantised(source: Source) -> bool:
    """Whether a model is a folder that config.json calls quantised: by accelpatch, or by others as they do it."""
    if source.kind != "folder":
        return False
    config = checkpoint.read_json(Path(source.location) / "config.json")
    return checkpoint.quantization_method(config) is not None


def context_length(source: Source) -> int | None:
    """The longest sequence in tokens, by the configuration or the file's header; None where neither is here."""
    if source.kind == "gguf" and not (source.from_folder and (Path(source.location).parent / "config.json").is_file()):
        file = Metadata(Path(source.location), read_header(Path(source.location)))
        return _number(file.facts, ("context_length",))
    config = source.config
    if config is None and source.kind != "hub":
        place = Path(source.location)
        config = checkpoint.read_config(place.parent if place.is_file() else place, foreign=True)
    return _number(config or {}, CONTEXT)


def _number(facts: dict[str, Any], names: tuple[str, ...]) -> int | None:
    parts = (facts.get("text_config"), facts)
    found = (part.get(name) for part in parts if isinstance(part, dict) for name in names)
    return next((one for one in found if type(one) is int), None)


def check_adapter(folder: Path) -> None:
    """Raise LoadError for a folder that holds no adapter in safetensors."""
    if (folder / ADAPTER).is_file() and (folder / ADAPTER_WEIGHTS).is_file():
        return
    inside = sorted(folder.glob("checkpoints/checkpoint-*"), key=lambda path: path.stat().st_mtime)
    hint = f"; {inside[-1]} is a checkpoint of a run that was stopped" if inside else ""
    raise LoadError(f"{folder} holds no adapter ({ADAPTER} and {ADAPTER_WEIGHTS}){hint}: name the folder of one")
