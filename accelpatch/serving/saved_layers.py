"""The quantised layers of a folder that accelpatch saved, as an engine asks for them: by the names of its own layers,
in which several of the checkpoint's may lie one after the other (q_proj, k_proj and v_proj as qkv_proj)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from accelpatch.checkpoints.export_formats import KINDS
from accelpatch.checkpoints.saved import Saved, read
from accelpatch.errors import LoadError
from accelpatch.models import checkpoint
from accelpatch.quant.weight import PARTS

DTYPES = {
    "I8": torch.int8, "U8": torch.uint8, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


#: kinds whose canonical layout has another name in quant.formats
LAYOUTS = {"fp8": "w8a8", "fp8 weights": "fp8"}


@dataclass(frozen=True)
class Part:
    """One tensor of a quantised weight: as wide as its columns are, whatever its rows."""

    dtype: torch.dtype
    columns: int


@dataclass(frozen=True)
class SavedLayer:
    """What a layer's weight is made of. kind: as quant.formats.weight_of takes it."""

    kind: str
    parts: Mapping[str, Part]


class SavedLayers:
    """The layers of a saved folder. Raises LoadError for a folder that is none."""

    def __init__(self, folder: Path):
        self._folder, names = folder, checkpoint.shard_names(folder)
        self._saved: Saved = read(folder / name for name in names)

    def of(self, names: Sequence[str]) -> SavedLayer | None:
        """The layer that holds the weights of these paths; None where none of them is quantised.

        Raises LoadError where they cannot lie in one weight, or an engine cannot hold them.
        """
        quantised = [name for name in names if name in self._saved.sites]
        if not quantised:
            return None
        if len(quantised) < len(names):
            floats = ", ".join(sorted(set(names) - set(quantised)))
            raise LoadError(f"{floats} is float and {quantised[0]} is not: vLLM holds them in one weight")
        layers = [self._layer(name) for name in names]
        for name, layer in zip(names, layers, strict=True):
            if layer != layers[0]:
                raise LoadError(f"{name} and {names[0]} are quantised in different ways: vLLM holds them in one weight")
        return layers[0]

    @property
    def head(self) -> str | None:
        """The path of the quantised output head; None where it is float."""
        return next((path for path in self._saved.sites if path.rpartition(".")[2] == "lm_head"), None)

    @property
    def tied(self) -> bool:
        """Whether that head is the table of embeddings too, which has no tensor of its own then."""
        return self.head is not None and not any("embed_tokens." in name for name in self._saved.tensors)

    def _layer(self, path: str) -> SavedLayer:
        replacer, tensors = self._saved.sites[path], self._saved.tensors
        found = {part: tensors[f"{path}.{part}"] for part in PARTS if f"{path}.{part}" in tensors}
        odd = sorted(found.keys() & {"order", "input_scale"})
        if replacer not in KINDS or odd:
            why = f"has {odd[0]}" if odd else f"is replaced by {replacer}"
            raise LoadError(
                f"{path} {why}, which the vLLM plugin does not hold: it takes {', '.join(KINDS)}, without "
                "act-order and static scales; `accelpatch export` writes what vLLM reads by itself"
            )
        parts = {}
        for name, stored in found.items():
            if stored.dtype not in DTYPES or len(stored.shape) != 2:
                raise LoadError(f"{stored.file}: {path}.{name} is {stored.dtype} {list(stored.shape)}: write it again")
            parts[name] = Part(DTYPES[stored.dtype], stored.shape[1])
        return SavedLayer(LAYOUTS.get(KINDS[replacer], KINDS[replacer]), parts)
