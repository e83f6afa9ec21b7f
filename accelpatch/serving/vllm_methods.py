"""vLLM's view of saved patched models: a quantisation config and two methods, for linear layers and for embeddings.

Loaded by vllm_plugin.register alone, where vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from accelpatch import device as devices
from accelpatch.checkpoints.saved import METHOD, VERSION
from accelpatch.errors import LoadError
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.ops.linear.by_layout import laid_out
from accelpatch.quant.formats import weight_of
from accelpatch.serving.saved_layers import SavedLayer, SavedLayers
from accelpatch.serving.served_weights import hold, served_embedding, served_linear


class SavedConfig(QuantizationConfig):
    """`quantization_config` of a folder that accelpatch saved. Which layers are quantised how is in its weight files,
    whose headers are read as soon as vLLM says where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: SavedLayers | None = None

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedConfig:
        if config.get("version") != VERSION:
            raise LoadError(f"version {config.get('version')!r} of accelpatch's format is not {VERSION}: upgrade it")
        return cls()

    def maybe_update_config(self, model_name: str, *_: Any, **__: Any) -> None:
        folder = Path(model_name)
        if not folder.is_dir():
            raise LoadError(f"{model_name} is no folder here: the accelpatch plugin serves folders, so download it")
        self.layers = SavedLayers(folder)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase | VocabParallelEmbedding):
            return None
        if self.layers is None:
            raise LoadError("this release of vLLM hides from the accelpatch plugin where the model is: upgrade it")
        if isinstance(layer, VocabParallelEmbedding):  # vLLM gives some of them no prefix
            head = self.layers.head if isinstance(layer, ParallelLMHead) or self.layers.tied else None
            saved = None if head is None else self.layers.of([head])
            return None if saved is None else SavedEmbeddingMethod(saved)
        saved = self.layers.of(self._names(prefix))
        return UnquantizedLinearMethod() if saved is None else SavedLinearMethod(saved)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Names as vLLM has them: a tied head is saved as the head, and vLLM looks for the embeddings alone."""
        if self.layers is None or not self.layers.tied:
            return WeightsMapper()
        return WeightsMapper(orig_to_new_prefix={f"{self.layers.head}.": "model.embed_tokens."})

    def _names(self, prefix: str) -> Sequence[str]:
        """The checkpoint's paths of a layer of vLLM's."""
        parent, _, name = prefix.rpartition(".")
        together = getattr(self, "packed_modules_mapping", {}).get(name, [name])
        return [f"{parent}.{one}" if parent else one for one in together]


class SavedLinearMethod(LinearMethodBase):
    """y = x @ w^T + bias by accelpatch's kernel for the layer's layout."""

    def __init__(self, saved: SavedLayer):
        self._saved, self._dtype = saved, torch.float32

    def create_weights(
        self, layer: torch.nn.Module, input_size_per_partition: int, output_partition_sizes: list[int],
        input_size: int, output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Parameters under the checkpoint's names; vLLM's own loaders cut them for a rank and lay them together."""
        self._dtype = params_dtype
        for name, part in self._saved.parts.items():
            columns = part.columns
            if columns > 1:
                if columns * input_size_per_partition % input_size:
                    raise LoadError(f"{columns} groups of inputs cannot be split over these ranks: use fewer")
                columns = columns * input_size_per_partition // input_size
            parameter = torch.nn.Parameter(
                torch.empty(sum(output_partition_sizes), columns, dtype=part.dtype), requires_grad=False
            )
            attributes = {"output_dim": 0, **extra_weight_attrs} | ({"input_dim": 1} if part.columns > 1 else {})
            for attribute, value in attributes.items():
                setattr(parameter, attribute, value)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Lay the weight out for the device; the tensors of the checkpoint go."""
        parts = {name: getattr(layer, name).data for name in self._saved.parts}
        rows = weight_of(self._saved.kind, parts)
        for name in parts:
            delattr(layer, name)
        target: Any = layer
        target.accelpatch_rows = rows.n
        native = self._dtype == torch.float32 and not rows.w.is_floating_point()  # what the CPU's packs are for
        native = native and native_library.why_not(devices.probe("cpu")) is None
        target.accelpatch_weight = hold(laid_out(rows, self._dtype, packable=native))

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return served_linear(x, bias, layer.accelpatch_weight, layer.accelpatch_rows)


class SavedEmbeddingMethod(SavedLinearMethod):
    """The same for a table of embeddings, and for a head that is tied to it."""

    def embedding(self, layer: torch.nn.Module, input_: Tensor) -> Tensor:
        return served_embedding(input_, layer.accelpatch_weight, self._dtype)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The head that is the table."""
        return embed_tokens
