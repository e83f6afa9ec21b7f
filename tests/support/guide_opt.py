"""SmoothQuant's int8 OPT by its own arithmetic, in plain torch: the checkpoint of a float model, and what it computes.

Written after the published classes (Int8OPTDecoderLayer and the layers in it), sharing no code with accelpatch: absmax
scales of whole tensors, factors alpha and beta, probabilities times 127.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import OPTConfig, OPTForCausalLM

VOCABULARY, HEADS, LAYERS = 128, 4, 3
Tensors = dict[str, Tensor]


def float_opt(seed: int = 0, **changes: Any) -> Any:
    """A tiny float OPT whose weights make it attend to some tokens more than to others."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    known = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "word_embed_proj_dim": 64, "dropout": 0.0}
    ends = {"eos_token_id": VOCABULARY - 1, "bos_token_id": 2, "pad_token_id": 1}
    model = OPTForCausalLM(OPTConfig(**{**sizes, **known, **ends, **changes})).eval()
    for name, parameter in model.named_parameters():
        std = 0.25 if "q_proj.w" in name or "k_proj.w" in name else 1.0 if "embed" in name else 0.1
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=std)
    return model


def inputs(rows: int = 2, length: int = 19) -> Tensor:
    return torch.randint(3, VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(1))


def extremes(model: Any, ids: Tensor) -> dict[str, float]:
    """Linear layer and "input" or "output" -> largest magnitude while ids run through the model."""
    found: dict[str, float] = {}

    def hook(name: str) -> Any:
        def see(module: Any, args: Any, output: Tensor) -> None:
            for side, tensor in (("input", args[0]), ("output", output)):
                found[f"{name}.{side}"] = max(found.get(f"{name}.{side}", 0.0), float(tensor.abs().max()))

        return see

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def absmax(tensor: Tensor) -> tuple[Tensor, float]:
    scale = float(tensor.abs().max()) / 127
    return (tensor / scale).round().to(torch.int8), scale


def checkpoint(model: Any, ids: Tensor) -> Tensors:
    """The state dict of the int8 model, as the published export makes it (without smoothing the weights first)."""
    seen, made = extremes(model, ids), dict(model.state_dict())
    for place, layer in enumerate(model.model.decoder.layers):
        path = f"model.decoder.layers.{place}"
        of = {name: seen[f"{path}.{name}"] / 127 for name in
              ("self_attn.q_proj.input", "self_attn.q_proj.output", "self_attn.k_proj.output",
               "self_attn.v_proj.output", "self_attn.out_proj.input", "fc1.input", "fc2.input")}  # fmt: skip
        given, q, k, v, out, fc1, fc2 = of.values()
        scaling = layer.self_attn.head_dim**-0.5
        scales = {
            "self_attn.q_proj": (given, q * scaling, scaling), "self_attn.k_proj": (given, k, 1.0),
            "self_attn.v_proj": (given, v, 1.0), "fc1": (fc1, fc2, 1.0),
            "self_attn.out_proj": (out, None, 1.0), "fc2": (fc2, None, 1.0),
        }  # fmt: skip
        for name, (one, other, times) in scales.items():
            linear = layer.get_submodule(name)
            weight, of_weight = absmax(linear.weight.detach() * times)
            bias = linear.bias.detach() * times
            tensors = {"weight": weight, "bias": bias[None].clone(), "a": torch.tensor(one * of_weight)}
            if other is not None:
                tensors["bias"], of_bias = absmax(bias[None])
                tensors |= {"a": torch.tensor(one * of_weight / other), "b": torch.tensor(of_bias / other)}
            made |= {f"{path}.{name}.{part}": tensor for part, tensor in tensors.items()}
        for name, scale in (("self_attn_layer_norm", given), ("final_layer_norm", fc1)):
            norm = layer.get_submodule(name)
            made |= {f"{path}.{name}.{part}": getattr(norm, part).detach() / scale for part in ("weight", "bias")}
        made[f"{path}.self_attn.qk_bmm.a"] = torch.tensor(q * scaling * k)
        made[f"{path}.self_attn.pv_bmm.a"] = torch.tensor(1 / 127 * v / out)
    made.pop("lm_head.weight", None)  # tied
    return made


def write(folder: Path, tensors: Mapping[str, Tensor], config: Any) -> Path:
    """A folder as the published one is, in safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = config.to_dict() | {"architectures": ["Int8OPTForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(facts))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def logits(tensors: Tensors, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the published classes compute in float32, without a cache: [B, L, V]."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) * mask - 1).long() + 2
    x = functional.embedding(ids, tensors["model.decoder.embed_tokens.weight"])
    x = x + functional.embedding(positions, tensors["model.decoder.embed_positions.weight"])
    length = ids.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    added = torch.zeros(len(ids), 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    for place in range(LAYERS):
        x = layer(tensors, f"model.decoder.layers.{place}", x, added)
    norm = (tensors[f"model.decoder.final_layer_norm.{part}"] for part in ("weight", "bias"))
    return functional.layer_norm(x, x.shape[-1:], *norm) @ tensors["model.decoder.embed_tokens.weight"].t()


def layer(tensors: Tensors, path: str, x: Tensor, added: Tensor) -> Tensor:
    def norm(name: str, given: Tensor) -> Tensor:
        weight, bias = (tensors[f"{path}.{name}.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(given, given.shape[-1:], weight, bias, 1e-5).round().clamp(-128, 127)

    def product(name: str, given: Tensor, relu: bool = False) -> Tensor:
        weight, bias, a = (tensors[f"{path}.{name}.{part}"] for part in ("weight", "bias", "a"))
        y = (given.double() @ weight.double().t()).float() * a
        if bias.dtype != torch.int8:
            return y + bias
        y = y + tensors[f"{path}.{name}.b"] * bias.float()
        return (y.relu() if relu else y).round().clamp(-128, 127)

    given = norm("self_attn_layer_norm", x)
    batch, length, width = x.shape
    parts = (product(f"self_attn.{name}_proj", given) for name in "qkv")
    q, k, v = (one.view(batch, length, HEADS, -1).transpose(1, 2) for one in parts)
    p = (q @ k.transpose(2, 3) * tensors[f"{path}.self_attn.qk_bmm.a"] + added).softmax(-1)
    attended = ((p * 127).round() @ v * tensors[f"{path}.self_attn.pv_bmm.a"]).round().clamp(-128, 127)
    x = x + product("self_attn.out_proj", attended.transpose(1, 2).reshape(batch, length, width))
    return x + product("fc2", product("fc1", norm("final_layer_norm", x), relu=True))
