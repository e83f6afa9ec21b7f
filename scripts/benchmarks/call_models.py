"""Models of random weights that topics of calls.py call: their shapes, and each call that is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from scripts.benchmarks.engines import SHAPES, ids_of, plain

Call = Callable[[Any], Any]
#: batch x ids of the calls model(ids)
SIZES = {
    "cuda": [(1, 1), (1, 32), (1, 128), (1, 512), (1, 2048), (8, 32), (8, 128), (8, 512), (8, 2048)],
    "cpu": [(1, 1), (1, 32), (1, 128), (1, 512), (8, 16)],
}
NEW = {"cuda": 32, "cpu": 16}  # tokens of a call of generate()


def forward(batch: int, length: int) -> Call:
    """model(ids), as who scores or embeds calls it."""
    return torch.no_grad()(lambda model: model(ids_of(model, batch, length)).logits)


def generating(batch: int = 1, **options: Any) -> Call:
    """generate() of exactly so many greedy tokens after a prompt of 128."""
    return lambda model: plain(model, ids_of(model, batch, 128), NEW[model.device.type], **options)


def hooked(model: Any) -> Any:
    """generate() while somebody watches one module."""
    handle = model.get_submodule("model.layers.3.mlp").register_forward_hook(lambda module, args, out: None)
    try:
        return generating()(model)
    finally:
        handle.remove()


def assisted(model: Any) -> Any:
    """generate() with a small model that drafts."""
    if not hasattr(model, "bench_assistant"):
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 2
        with next(model.parameters()).device:
            vars(model)["bench_assistant"] = type(model)._from_config(config, dtype=model.dtype).eval()
    return generating(assistant_model=vars(model)["bench_assistant"])(model)


PATHS: dict[str, Call] = {
    "generate, prompt 128": generating(), "generate, batch 64": generating(batch=64),
    "beams of 4": generating(num_beams=4), "sampled": generating(num_beams=1, top_k=50),
    "a forward hook on one module": hooked, "an assistant model": assisted,
    "output_scores": generating(return_dict_in_generate=True, output_scores=True),
    "hidden states": generating(return_dict_in_generate=True, output_hidden_states=True),
}  # fmt: skip


class Input:
    """A fixed random tensor, made when it is first needed, and moved to a model's device and dtype once."""

    def __init__(self, make: Callable[[torch.Generator], Tensor]):
        self._make, self._held = make, torch.empty(0, device="meta")

    def on(self, model: Any) -> Tensor:
        if self._held.is_meta:
            self._held = self._make(torch.Generator().manual_seed(0))
        dtype = model.dtype if self._held.is_floating_point() else self._held.dtype
        if (self._held.device, self._held.dtype) != (model.device, dtype):
            self._held = self._held.to(model.device, dtype)
        return self._held


def masked(batch: int, length: int, least: int = 0) -> Call:
    """An encoder over texts of `least` (0: all of them `length`) to `length` ids, masked as a tokenizer does it."""

    def make(draw: torch.Generator) -> Tensor:
        lengths = torch.randint(least or length, length + 1, (batch,), generator=draw)
        return (torch.arange(length) < lengths[:, None]).long()

    mask = Input(make)

    def call(model: Any) -> Any:
        with torch.no_grad():
            found = model(ids_of(model, batch, length), attention_mask=mask.on(model)).last_hidden_state
        return found * mask.on(model)[..., None]  # what is at padded places is nobody's

    return call


def pictures(batch: int) -> Call:
    """A vision encoder."""
    pixels = Input(lambda draw: torch.randn(batch, 3, 224, 224, generator=draw))
    return torch.no_grad()(lambda model: model(pixels.on(model)).last_hidden_state)


def seeing(new: int) -> Call:
    """A picture of 32 x 32 patches, which are 256 tokens, and 34 tokens of text."""
    pixels = Input(lambda draw: torch.randn(1024, 1176, generator=draw))
    grid, config = Input(lambda draw: torch.tensor([[1, 32, 32]])), transformers.Qwen2_5_VLConfig()

    def words(draw: torch.Generator) -> Tensor:
        ids = torch.randint(5, 1000, (1, 290), generator=draw)
        ids[0, 10], ids[0, 11:267], ids[0, 267] = (
            config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
        )  # fmt: skip
        return ids

    text, types = Input(words), Input(lambda draw: (words(draw) == config.image_token_id).int())
    return lambda model: plain(
        model, text.on(model), new, image_grid_thw=grid.on(model), mm_token_type_ids=types.on(model),
        pixel_values=pixels.on(model),
    )  # fmt: skip


def picture(model: Any) -> dict[str, Tensor]:
    """Ids of words around a picture, the picture, and types where they count; for models with one size of pictures."""
    config, draw = model.config, torch.Generator().manual_seed(0)
    size = config.vision_config.image_size
    count = getattr(config, "image_seq_length", None) or config.mm_tokens_per_image
    ids = torch.randint(5, 500, (1, 32 + count), generator=draw)
    ids[0, 16 : 16 + count] = config.image_token_id
    given = {"ids": ids, "pixel_values": torch.randn(1, 3, size, size, generator=draw).to(model.dtype)}
    if config.model_type == "gemma3":
        given["token_type_ids"] = (ids == config.image_token_id).int()
    return {name: value.to(model.device) for name, value in given.items()}


#: models beside the language model -> (shape, calls)
OTHERS: Mapping[str, tuple[str, dict[str, Call]]] = {
    "bert": ("BERT-base", {f"{b} x {n} ids": forward(b, n) for b, n in ((1, 32), (8, 128))}),
    "bert-large": ("BERT-large", {f"{b} x {n} ids": masked(b, n) for b, n in
                                  ((1, 32), (8, 64), (32, 128), (16, 512), (64, 512))}
                   | {"64 texts of 8 to 512 ids": masked(64, 512, 8)}),
    "vit-large": ("ViT-large", {f"{batch} pictures": pictures(batch) for batch in (1, 8, 32, 64)}),
    "qwen2.5-vl": ("Qwen2.5-VL-3B", {f"a picture, {new} tokens": seeing(new) for new in (1, 64)}),
    "qwen2.5-vl-0.5b": ("Qwen2.5-VL of 0.5B", {f"a picture, {new} tokens": seeing(new) for new in (1, 64)}),
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """generate() of an encoder-decoder of a shape, greedy where not said otherwise: rows at once."""

    shape: str
    rows: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, prompt: int, new: int) -> Call:
        """Exactly so many new tokens after 30 s of sound, or texts of `prompt` tokens."""
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **self.options}
        ids = Input(lambda draw: torch.randint(5, 500, (self.rows, prompt), generator=draw))
        mask = Input(lambda draw: torch.ones(self.rows, prompt, dtype=torch.int64))
        mels = SHAPES[self.shape]["config"].get("num_mel_bins")
        sound = Input(lambda draw: torch.randn(self.rows, mels, 3000, generator=draw))
        if mels:
            return lambda model: model.generate(input_features=sound.on(model)[:, : model.config.num_mel_bins], **given)
        return lambda model: model.generate(input_ids=ids.on(model), attention_mask=mask.on(model), **given)


TEXTS = {
    "whisper": Text("Whisper-large-v3"), "whisper-16": Text("Whisper-large-v3", 16), "t5": Text("Flan-T5-XL"),
    "t5-beams": Text("Flan-T5-XL", options={"num_beams": 4}), "whisper-base": Text("Whisper-base"),
    "t5-small": Text("T5-small"), "t5-small-beams": Text("T5-small", options={"num_beams": 4}),
    "marian": Text("Marian"),
}  # fmt: skip


class OwnConfig(transformers.PreTrainedConfig):
    """Of OwnModel."""

    model_type = "benchmark-own"

    def __init__(self, size: int = 2048, depth: int = 16, heads: int = 16, vocab_size: int = 32000, **others: Any):
        self.size = self.hidden_size = size
        self.depth = self.num_hidden_layers = depth
        self.heads = self.num_attention_heads = heads
        self.vocab_size = vocab_size
        super().__init__(**others)


class Layer(nn.Module):
    """Attention and a squared-ReLU MLP, each with a norm before and a learned scale after."""

    def __init__(self, size: int, heads: int, place: int):
        super().__init__()
        self.heads, self.place = heads, place
        self.before, self.between = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mix, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.scale = nn.Parameter(torch.ones(2, size))

    def forward(self, x: Tensor, cache: Any = None, causal: bool = False) -> Tensor:
        rows, length, size = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if cache is not None:
            k, v = cache.update(k, v, self.place)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal and length > 1)
        x = x + self.scale[0] * self.out(y.transpose(1, 2).reshape(rows, length, size))
        return x + self.scale[1] * self.narrow(self.wide(self.between(x)).relu().square())


class OwnModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A language model of a class that no library has."""

    config_class = OwnConfig
    _supports_sdpa = True

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.size)
        self.blocks = nn.ModuleList([Layer(config.size, config.heads, place) for place in range(config.depth)])
        self.head = nn.Linear(config.size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = True,
        logits_to_keep: int = 0, **others: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        cache = past_key_values if past_key_values is not None or not use_cache else DynamicCache()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, cache, causal=True)
        return CausalLMOutputWithPast(logits=self.head(x[:, -logits_to_keep:]), past_key_values=cache)
