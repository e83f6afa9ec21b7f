"""The models that accelpatch knows by a short name: their source and their configuration.

Configurations are copies of the models' ``config.json``, in transformers 5's keys: planning needs no network.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelpatch.errors import LoadError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class CatalogEntry:
    """A known model. config: its transformers configuration, with ``model_type`` and ``dtype``."""

    name: str
    hub_name: str
    config: Mapping[str, Any]
    embedded: bool = False  # comes from the package index, not from the hub


@dataclass(frozen=True)
class Source:
    """Where a model comes from. kind: "embedded", "hub", "folder" or "gguf". location: hub name or path.

    beside: whether a GGUF file was given by its folder, whose configuration and tokenizer are then the file's.
    """

    kind: str
    name: str
    location: str
    config: dict[str, Any] | None = None
    beside: bool = False


#: the numbers of a Llama-like configuration, and of OPT's
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
_OPT_SIZES = ("hidden_size", "ffn_dim", "word_embed_proj_dim", "num_hidden_layers", "num_attention_heads")


def _llama(kind: str, sizes: tuple[int, ...], base: float, **config: Any) -> dict[str, Any]:
    """A configuration of a Llama-like model. kind: the beginning of its class's name. sizes: the values of _SIZES.
    base: of the rotary frequencies. config: what else it has, or has otherwise."""
    common = {
        "model_type": kind.lower(),
        "architectures": [f"{kind}ForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": base, **config.pop("rope", {})},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return {**common, **dict(zip(_SIZES, sizes, strict=True)), **config}


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return dict(zip(_OPT_SIZES, (hidden, 4 * hidden, hidden, layers, heads), strict=True)) | {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "dtype": "float16",
    }


_SMOLLM2_135M = _llama(
    "Llama", (576, 1536, 30, 9, 3, 49152, 8192, 1, 2), 100000.0, tie_word_embeddings=True, pad_token_id=2,
    dtype="float32",  # what the conversion holds: bfloat16 would round the file's values once more
)  # fmt: skip
_LLAMA2_7B = _llama("Llama", (4096, 11008, 32, 32, 32, 32000, 4096, 1, 2), 10000.0, dtype="float16")
_LLAMA3_8B = _llama("Llama", (4096, 14336, 32, 32, 8, 128256, 8192, 128000, 128001), 500000.0)
_LLAMA32_1B = _llama(
    "Llama",
    (2048, 8192, 16, 32, 8, 128256, 131072, 128000, 128001),
    500000.0,
    rope={
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    head_dim=64,
    tie_word_embeddings=True,
)
_MISTRAL_7B = _llama("Mistral", (4096, 14336, 32, 32, 8, 32000, 32768, 1, 2), 10000.0, sliding_window=4096)
_QWEN3_06B = _llama(
    "Qwen3",
    (1024, 3072, 28, 16, 8, 151936, 40960, 151643, 151645),
    1000000.0,
    head_dim=128,
    max_window_layers=28,
    use_sliding_window=False,
    attention_bias=False,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
_MIXTRAL_8X7B = _llama(
    "Mixtral", (4096, 14336, 32, 32, 8, 32000, 32768, 1, 2), 1000000.0, num_local_experts=8, num_experts_per_tok=2
)
_QWEN3_30B = _QWEN3_06B | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_BLOOM_7B1 = {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "hidden_size": 4096,
    "n_layer": 30,
    "n_head": 32,
    "vocab_size": 250880,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "dtype": "float16",
}
_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "dtype": "float32",
}
_ENTRIES = (
    CatalogEntry("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", _SMOLLM2_135M, embedded=True),
    CatalogEntry("llama2-7b", "meta-llama/Llama-2-7b-hf", _LLAMA2_7B),
    CatalogEntry("llama3-8b", "meta-llama/Meta-Llama-3-8B", _LLAMA3_8B),
    CatalogEntry("llama3.2-1b", "meta-llama/Llama-3.2-1B", _LLAMA32_1B),
    CatalogEntry("mistral-7b", "mistralai/Mistral-7B-v0.1", _MISTRAL_7B),
    CatalogEntry("qwen3-0.6b", "Qwen/Qwen3-0.6B", _QWEN3_06B),
    CatalogEntry("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", _MIXTRAL_8X7B),
    CatalogEntry("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", _QWEN3_30B),
    CatalogEntry("opt-1.3b", "facebook/opt-1.3b", _opt(2048, 24, 32)),
    CatalogEntry("opt-2.7b", "facebook/opt-2.7b", _opt(2560, 32, 32)),
    CatalogEntry("opt-6.7b", "facebook/opt-6.7b", _opt(4096, 32, 32)),
    CatalogEntry("opt-13b", "facebook/opt-13b", _opt(5120, 40, 40)),
    CatalogEntry("bloom-7b1", "bigscience/bloom-7b1", _BLOOM_7B1),
    CatalogEntry("gpt2", "openai-community/gpt2", _GPT2),
)
CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def resolve(name: str) -> Source:
    """Find the source of a model: a short name of the catalog, else a path, else a name on the hub.

    For a folder with the name of a catalog entry write a path: ``./gpt2``. Raises LoadError for a path that does not
    exist, a file that is not GGUF, and a name that looks like a misspelt short name.
    """
    if entry := CATALOG.get(name.lower()):
        location = entry.name if entry.embedded else entry.hub_name
        return Source("embedded" if entry.embedded else "hub", entry.name, location, dict(entry.config))
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(name, path)
    if name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", ".safetensors", *_PICKLES)):
        raise LoadError(f"{name}: no such file or folder")
    if not _HUB_NAME.fullmatch(name):
        raise LoadError(
            f"{name!r} names no model: give a short name ({', '.join(CATALOG)}), a folder, a "
            ".gguf file or a name on the hub (owner/name)"
        )
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.75)):
        raise LoadError(
            f"no model is called {name!r}; did you mean {close[0]!r}? Known short names: {', '.join(CATALOG)}"
        )
    known = next((entry.config for entry in _ENTRIES if entry.hub_name == name), None)
    return Source("hub", name, name, None if known is None else dict(known))


def _local(name: str, path: Path) -> Source:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1 and not any((path / name).is_file() for name in _WEIGHTS):
            return Source("gguf", name, str(ggufs[0].absolute()), beside=True)
        return Source("folder", name, str(path.absolute()))
    if path.suffix == ".gguf":
        return Source("gguf", name, str(path.absolute()))
    if path.suffix in _PICKLES:
        raise LoadError(pickle_refusal(str(path)))
    raise LoadError(f"{name} is a file: give the folder that holds config.json and the weights, or a .gguf file")


def pickle_refusal(place: str) -> str:
    """The error message for a checkpoint in a format that can run code when loaded."""
    return (
        f"{place} holds pickled weights, which can run code while they load, so they are refused. Convert them in an "
        "environment that you would risk: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) "
        "writes safetensors"
    )
