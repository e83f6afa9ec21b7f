"""transformers' configuration of a patched checkpoint: its recipe, and what its weights are read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from accelpatch.checkpoints.foreign import packed, sites_of
from accelpatch.checkpoints.gguf_tensors import GGUF
from accelpatch.checkpoints.saved import METHOD, VERSION, Saved, read
from accelpatch.errors import LoadError
from accelpatch.patching.extent import level_of
from accelpatch.recipe.recipe import Recipe, dump, load, parse

#: what the caller of `load` asks for (`verify`, `progress`), which no config.json can say
_asked: ContextVar[Mapping[str, Any]] = ContextVar("asked", default=MappingProxyType({}))


@contextmanager
def asking(**options: Any) -> Iterator[None]:
    """Context manager in which configurations that are read from a config.json get these options."""
    token = _asked.set(options)
    try:
        yield
    finally:
        _asked.reset(token)


class AccelpatchConfig(QuantizationConfigMixin):
    """`quantization_config` of transformers: quantise by a recipe while a float checkpoint loads.

    recipe: a bundled recipe's name, a YAML file's path, or YAML text. progress: called with (stage, done, total).
    resume: a folder for finished weights, from which an interrupted run goes on; it is the caller's to remove. layout:
    of a checkpoint that others wrote (foreign.py). verify: how much is verified (patching/extent.py). verified: of a
    saved model, the digest of what computed while it was verified. stored: a GGUF file's tensors (gguf_tensors.py), set
    afterwards.
    """

    stored: Saved | None = None

    def __init__(
        self, recipe: str | Path | Mapping[str, Any] | Recipe = "int8", version: int = VERSION, progress: Any = None,
        resume: Path | None = None, layout: dict[str, Any] | None = None, verify: bool | str = True,
        verified: str = "", **_: Any,
    ):  # fmt: skip
        self.quant_method = METHOD
        self.version, self.layout = version, layout
        self.progress, self.resume = progress, resume
        self.level, self.verified = level_of(verify), verified
        text = recipe if isinstance(recipe, str) else ""
        self._recipe = parse(text, source="the checkpoint's recipe") if "\n" in text else load(recipe)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Of a config.json, whose recipe is YAML text: no name there makes another file be read. Raises LoadError."""
        text = config_dict.get("recipe")
        if not isinstance(text, str):
            raise LoadError(f"config.json has the recipe {text!r}, which is no text: write the checkpoint again")
        parsed: dict[str, Any] = {k: v for k, v in config_dict.items() if k in ("version", "layout", "verified")}
        parsed |= {"recipe": parse(text, source="the recipe in config.json"), **_asked.get()}
        return super().from_dict(parsed, return_unused_kwargs, **kwargs)

    def opened(self, files: Any) -> tuple[Saved, Any]:
        """The headers of what loads; and of another's layout, its parts and their reader, with its arguments."""
        if self.stored is not None:
            return self.stored, (GGUF, {})
        layout = self.layout
        saved = read(files, None if layout is None else partial(sites_of, layout))
        made = None if layout is None else packed(layout)
        return saved, None if made is None else (made, layout)

    @property
    def loaded(self) -> Recipe:
        """The recipe."""
        return self._recipe

    def to_dict(self) -> dict[str, Any]:
        """As in config.json."""
        return {"quant_method": METHOD, "version": self.version, "recipe": dump(self._recipe)}

    to_diff_dict = to_dict
