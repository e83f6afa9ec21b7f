"""Stand-ins for other libraries' quantised linear layers: the same class names and tensors, forwards by formula.

A model comes from a fixture (tests/fixtures/foreign): its tensors lie in these modules as the library would hold them.
The formulas are those of the fixtures' README, and share no code with the readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[1] / "fixtures/foreign"
K_PROJ = "model.layers.0.self_attn.k_proj"
Parts = dict[str, Tensor]


def fields(words: Tensor, bits: int) -> Tensor:
    """The fields of int32 words [rows, columns], low first: [rows, columns * 32 / bits]."""
    wide = words.long() & 0xFFFFFFFF
    return torch.stack([(wide >> shift) & (2**bits - 1) for shift in range(0, 32, bits)], dim=-1).flatten(1)


class QuantState:
    """bitsandbytes' state of a 4-bit weight."""

    def __init__(self, parts: Parts, facts: dict[str, Any]):
        self.quant_type, self.blocksize = facts["quant_type"], facts["blocksize"]
        self.shape, self.dtype = torch.Size(facts["shape"]), getattr(torch, facts["dtype"])
        self.absmax, self.code = parts["weight.absmax"], parts["weight.quant_map"]
        self.nested = "weight.nested_absmax" in parts
        self.state2, self.offset = None, None
        if self.nested:
            self.offset = torch.tensor(facts["nested_offset"])
            self.state2 = State2(parts, facts)


class State2:
    """Its scales' own scales."""

    def __init__(self, parts: Parts, facts: dict[str, Any]):
        self.absmax, self.code = parts["weight.nested_absmax"], parts["weight.nested_quant_map"]
        self.blocksize, self.dtype = facts["nested_blocksize"], torch.float32


class Linear4bit(nn.Linear):
    """bitsandbytes' 4 bits; a forward on a CPU packs the weight anew, and rounds its scales."""

    def hold(self, parts: Parts) -> None:
        name = next(name for name in parts if "quant_state" in name)
        facts = json.loads(bytes(parts[name].tolist()))
        weight: Any = nn.Parameter(parts["weight"], requires_grad=False)
        weight.quant_state, weight.module = QuantState(parts, facts), self
        self.weight = weight

    def floats(self) -> Tensor:
        state: Any = self.weight.quant_state  # type: ignore[union-attr]
        absmax = state.absmax
        if state.nested:
            blocks = torch.arange(len(absmax)) // state.state2.blocksize
            absmax = state.state2.code[absmax.long()] * state.state2.absmax[blocks] + state.offset
        flat = self.weight.detach().flatten()
        codes = torch.stack([flat >> 4, flat & 15], dim=1).flatten().long()
        return (state.code[codes] * absmax[torch.arange(len(codes)) // state.blocksize]).view(state.shape)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.quant_state.packing_format_for_cpu = True  # type: ignore[union-attr]
        return functional.linear(x, self.floats().to(x.dtype), self.bias)


class State:
    """bitsandbytes' state of an 8-bit weight."""

    has_fp16_weights = False
    CB: Tensor | None = None
    SCB: Tensor | None = None


class Linear8bitLt(nn.Linear):
    """LLM.int8(); SCB moves from the weight to the state at the first call."""

    def hold(self, parts: Parts) -> None:
        weight: Any = nn.Parameter(parts["weight"], requires_grad=False)
        weight.CB, weight.SCB = weight.data, parts["SCB"]
        self.weight, self.state = weight, State()

    def floats(self) -> Tensor:
        scale = self.state.SCB if self.weight.SCB is None else self.weight.SCB  # type: ignore[union-attr]
        assert scale is not None
        return self.weight.detach().float() * scale[:, None] / 127

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.CB is not None:
            self.state.CB, self.state.SCB, weight.CB, weight.SCB = weight.CB, weight.SCB, None, None
        return functional.linear(x, self.floats().to(x.dtype), self.bias)


class Buffers(nn.Module):
    """A layer whose tensors, the bias too, are buffers."""

    def __init__(self, k: int, n: int, bias: bool, **_: Any):
        super().__init__()
        self.in_features, self.out_features = k, n

    def hold(self, parts: Parts) -> None:
        for name, tensor in parts.items():
            self.register_buffer(name, tensor)
        self.bias: Tensor | None = getattr(self, "bias", None)

    def floats(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.floats().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class TorchLinear(Buffers):
    """GPTQModel's plain kernel; zero points as v2 has them."""

    REQUIRES_FORMAT_V2 = True
    adapter: Any = None

    def hold(self, parts: Parts, bits: int = 4, sym: bool = True, checkpoint_format: str = "gptq", **_: Any) -> None:
        if checkpoint_format == "gptq":
            more = 0x11111111 if bits == 4 else 0x01010101
            parts = parts | {"qzeros": (parts["qzeros"].long() + more).to(torch.int32)}
        super().hold(parts)
        self.bits, self.sym, self.format, self._qzeros_format = bits, sym, checkpoint_format, 2

    def floats(self) -> Tensor:
        codes, zeros = fields(self.qweight.t(), self.bits).t(), fields(self.qzeros, self.bits)
        group = self.g_idx.long()
        return (self.scales.float()[group] * (codes - zeros[group])).t()


class WQLinear_GEMM(Buffers):
    """AutoAWQ's GEMM kernel."""

    def hold(self, parts: Parts, bits: int = 4, group_size: int = 128, **_: Any) -> None:
        super().hold(parts)
        self.w_bit, self.group_size = bits, group_size

    def columns(self, words: Tensor) -> Tensor:
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        return fields(words, 4).view(len(words), -1, 8)[:, :, order].flatten(1)

    def floats(self) -> Tensor:
        codes, zeros = self.columns(self.qweight), self.columns(self.qzeros)
        group = torch.arange(len(codes)) // self.group_size
        return (self.scales.float()[group] * (codes - zeros[group])).t()


class WQLinear_GEMV(WQLinear_GEMM):
    """AutoAWQ's GEMV kernel."""

    def floats(self) -> Tensor:
        codes, zeros = fields(self.qweight, 4), fields(self.qzeros, 4)
        group = torch.arange(codes.shape[1]) // self.group_size
        return self.scales.float()[:, group] * (codes - zeros[:, group])


def compressed_forward(self: Any, x: Tensor) -> Tensor:
    """compressed-tensors' forward on the instance: the unpacked weight, which a packed module has not."""
    if not self.weight.is_floating_point() or self.weight.dtype.itemsize == 1:
        raise RuntimeError("the weight is packed")
    return functional.linear(x, self.weight.to(x.dtype), self.bias)


def compressed_floats(self: Any) -> Tensor:
    """The weight of a linear layer of compressed-tensors."""
    held = self._parameters
    if "weight_packed" not in held:
        scale: Tensor = held["weight_scale"].float().view(-1, 1)
        return held["weight"].float() * scale
    codes = fields(held["weight_packed"], 4)[:, : self.in_features]
    group = torch.arange(self.in_features) // (self.in_features // held["weight_scale"].shape[1])
    group = held["weight_g_idx"].long() if "weight_g_idx" in held else group
    zeros = torch.full((self.out_features, int(group.max()) + 1), 8)
    if "weight_zero_point" in held:
        zeros = fields(held["weight_zero_point"].t(), 4).t()[: self.out_features]
    return held["weight_scale"].float()[:, group] * (codes - zeros[:, group])


def compressed(module: nn.Linear, parts: Parts, scheme: Any) -> nn.Module:
    """An nn.Linear as compressed-tensors changes it."""
    held: Any = module
    del held._parameters["weight"]
    for name, tensor in parts.items():
        held.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    held.quantization_scheme, held.quantization_status = scheme, "compressed"
    held.forward = compressed_forward.__get__(module)
    return module


def unpacking_hook(model: Any) -> None:
    """compressed-tensors' hook: the first call unpacks every module, and removes the hook."""

    def unpack(model: Any, args: Any) -> None:
        for module in model.modules():
            if "quantization_scheme" in vars(module) and module.quantization_status == "compressed":
                full = compressed_floats(module)
                for name in list(module._parameters):
                    if name != "bias":
                        del module._parameters[name]
                module.weight = nn.Parameter(full, requires_grad=False)
                module.quantization_status = "decompressed"
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook

    model.ct_decompress_hook = model.register_forward_pre_hook(unpack)


def scheme_of(config: dict[str, Any], path: str) -> Any:
    """What compressed-tensors says of a layer's weight and inputs."""
    groups = list(config["config_groups"].values())
    group = next((one for one in groups if "self_attn" in str(one["targets"]) and "self_attn" in path), groups[-1])
    inputs = group["input_activations"]
    return SimpleNamespace(
        weights=SimpleNamespace(**group["weights"]), input_activations=inputs and SimpleNamespace(**inputs)
    )


CLASSES: dict[str, Callable[..., Any]] = {
    "gptq": TorchLinear, "gemm": WQLinear_GEMM, "gemv": WQLinear_GEMV, "4bit": Linear4bit, "8bit": Linear8bitLt,
}  # fmt: skip


def expected(name: str) -> dict[str, Tensor]:
    """A fixture's ids, logits and weights."""
    return load_file(ROOT / name / "expected.safetensors")


def model_of(name: str, plain: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> Any:
    """The model of a fixture with stand-ins for its quantised layers. plain: ends of the names of layers that are float
    (of the same weights)."""
    config = AutoConfig.from_pretrained(ROOT / name)
    given = config.quantization_config
    del config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    held = load_file(ROOT / name / "model.safetensors")
    for path, module in list(model.named_modules()):
        parts = {key[len(path) + 1 :]: one for key, one in held.items() if key.startswith(f"{path}.")}
        if isinstance(module, nn.Linear) and any(key not in ("weight", "bias") for key in parts):
            stored = _stored(module, parts, given, path)
            if path.endswith(plain):
                module = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=dtype)
                module.weight.data = floats_of(stored).to(dtype)
                stored = module.eval()
            model.set_submodule(path, stored)
    rest = {
        key: one for key, one in held.items() if key.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight"))
    }
    model.load_state_dict(rest, strict=False)
    if given["quant_method"] == "compressed-tensors":
        unpacking_hook(model)
    return model


def floats_of(module: Any) -> Tensor:
    """The float weight of a stand-in."""
    full: Tensor = compressed_floats(module) if type(module) is nn.Linear else module.floats()
    return full


def _stored(module: nn.Linear, parts: Parts, given: dict[str, Any], path: str) -> nn.Module:
    method = given["quant_method"]
    if method == "compressed-tensors":
        return compressed(module, parts, scheme_of(given, path))
    if method == "bitsandbytes":
        kind = "8bit" if given["load_in_8bit"] else "4bit"
    else:
        kind = method if method == "gptq" else str(given["version"]).lower()
    made = CLASSES[kind](module.in_features, module.out_features, bias=module.bias is not None)
    made.hold(parts) if method == "bitsandbytes" else made.hold(parts, **given)
    made.eval().requires_grad_(False)
    return made  # type: ignore[no-any-return]


def state(model: Any) -> dict[str, Any]:
    """What must be the same objects and the same bits after unpatch."""
    modules = {name: id(module) for name, module in model.named_modules()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return modules | {f"{name}, a tensor": (id(one), one.flatten().tolist()) for name, one in tensors.items()}
