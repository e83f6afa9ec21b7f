"""OPT's decoder layer in int8 from end to end: SmoothQuant's classes, under their names and with their tensors.

    LayerNormQ               q = rint(norm(x))                              weight, bias [K] float32, with 1 / scale in
    W8A8B8O8Linear           q = rint(a (x . weight^T) + b bias)            weight[N, K], bias[1, N] int8; a, b float32
    W8A8B8O8LinearReLU       the same through ReLU
    W8A8BF32OF32Linear       y = a (x . weight^T) + bias                    weight int8, bias[1, N] float32; a float32
    qk_bmm, pv_bmm           their factors: a of each                       kernels/ops/attention/int8_attention.py

Between the residual additions everything is int8: the norms' outputs, q, k and v and with them the KV cache, the
probabilities, and fc1's output. All scales are static; those of two neighbours are one factor. The state dict is that
of mit-han-lab/opt-13b-smoothquant (docs/smoothquant.md). Source: Xiao et al. 2022, arXiv:2211.10438, and its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError
from accelpatch.kernels.ops.attention.int8_attention import int8_attention
from accelpatch.kernels.ops.linear.gemm_w8a8 import gemm_w8a8
from accelpatch.kernels.ops.norm.layernorm_q import layernorm_q
from accelpatch.modules.replacement import adopt, is_observed, without_casts

IMPLEMENTATIONS = ("sdpa", "eager", None)  # of transformers' attention, whose masks are read
HOOKED = ("_forward", "_backward")  # how the tables of a module's hooks begin
JOINED = ("qkv", "factors", "added", "scales")
QKV = ("q_proj", "k_proj", "v_proj")
CACHES = ("past_key_values", "cache")  # the argument's name before transformers 5.24, and from then on


class StaticInt8(nn.Module):
    """Base of the parts: tensors under fixed names, which keep their dtypes whatever the model is cast to.

    alpha, beta: `a` and `b` as numbers, so that no call waits for the device.
    """

    alpha: float
    beta: float

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._read()

    def _read(self) -> None:
        """Read the factors off their tensors."""
        for number, name in (("alpha", "a"), ("beta", "b")):
            if name in self._buffers:
                setattr(self, number, float(self._buffers[name]))  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move with the model; a cast changes nothing."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        without_casts(self, before)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take tensors of this layout; a float weight, which torch would cut off to integers, is an error."""
        for name, tensor in self._buffers.items():
            given = state_dict.get(prefix + name)
            if tensor is None or given is None or tensor.is_meta:
                continue
            if given.dtype != tensor.dtype or not torch.equal(given.to(tensor.device), tensor):
                args[-1].append(f"{prefix}{name} ({given.dtype}) is of another model, and unpatch could not give it "
                                f"back ({tensor.dtype} is held here): unpatch first")  # fmt: skip
                return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._read()


class LayerNormQ(StaticInt8):
    """A LayerNorm with int8 outputs. weight, bias[K] float32: the float norm's, divided by the scale of its output."""

    weight: Tensor
    bias: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], eps: float):
        super().__init__(tensors)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """q[..., K] int8 of x[..., K]."""
        return layernorm_q(x, self.weight, self.bias, self.eps)


class W8A8B8O8Linear(StaticInt8):
    """A linear layer with int8 input, weight[N, K], bias[1, N] and output; a, b: the factors of product and bias."""

    weight: Tensor
    bias: Tensor
    activation = "none"

    def forward(self, x: Tensor) -> Tensor:
        """q[..., N] int8 of x[..., K] int8."""
        bias = self.bias.view(-1)
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = gemm_w8a8(
            rows, self.weight, self.alpha, None, None, bias, self.beta, None, self.activation, None, torch.int8
        )
        return y.view(*x.shape[:-1], -1)


class W8A8B8O8LinearReLU(W8A8B8O8Linear):
    """The same through ReLU: fc1."""

    activation = "relu"


class W8A8BF32OF32Linear(StaticInt8):
    """A linear layer with int8 input and weight[N, K], and float bias[1, N] and output; a: the factor of the int8
    product."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """y[..., N] of x[..., K] int8: float32, or added to residual[..., N], rounded once to its dtype."""
        rows = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(len(rows), -1)
        dtype = torch.float32 if residual is None else residual.dtype
        bias = self.bias.view(-1)
        y: Tensor = gemm_w8a8(rows, self.weight, self.alpha, None, None, bias, 1.0, None, "none", added, dtype)
        return y.view(*x.shape[:-1], -1)


class Int8OPTAttention(nn.Module):
    """OPT's attention in int8. Its output comes with the residual added, where one is given.

    q, k and v are one product: their weights are views of `qkv`[3 N, K], with `factors` and `added`[3 N] float32.
    """

    runs_original = False  # whose linear layers are floats
    qkv: Tensor
    factors: Tensor
    added: Tensor
    scales: Tensor
    head_dim: int
    layer_idx: int

    def join(self) -> None:
        """Lay the weights of q, k and v out as one."""
        parts: list[Any] = [self._modules[name] for name in QKV]
        joined = {
            "qkv": torch.cat([one.weight for one in parts]),
            "factors": torch.cat([one.a.expand(len(one.weight)) for one in parts]),
            "added": torch.cat([(one.b * one.bias.float()).view(-1) for one in parts]),
            "scales": torch.stack([cast(Any, self.qk_bmm).a, cast(Any, self.pv_bmm).a]),
        }
        for name, tensor in joined.items():
            self.register_buffer(name, tensor, persistent=False)
        for part, rows in zip(parts, self.qkv.split([len(one.weight) for one in parts]), strict=True):
            part._buffers["weight"] = rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name in JOINED:  # else every weight would move twice
            self._buffers.pop(name, None)
        super()._apply(fn, recurse)
        self.join()
        return self

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, residual: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """(y[B, L, K], None) of hidden_states[B, L, K] int8; the cache among kwargs takes k and v as int8.

        Raises KernelError under an attention implementation whose masks are not read here.
        """
        if (used := cast(Any, self.config)._attn_implementation) not in IMPLEMENTATIONS:
            raise KernelError(f"int8 attention reads the masks of sdpa and eager, not of {used}: set one of them")
        batch, length, _ = hidden_states.shape
        q, k, v = (one.view(batch, length, -1, self.head_dim).transpose(1, 2) for one in self._parts(hidden_states))
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        causal = attention_mask is None and length > 1
        if causal:  # transformers leaves the mask out where the cache was empty; a static one has more slots than keys
            k, v = k[:, :, :length], v[:, :, :length]
        mask = None if attention_mask is None else attention_mask[..., : k.shape[2]]
        y = int8_attention(q, k, v, self.scales, mask, causal)
        return cast(Any, self.out_proj)(y, residual), None

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: list[Any] = [self._modules[name] for name in QKV]
        if is_observed(*parts):
            return tuple(part(x) for part in parts)
        rows = x.reshape(-1, x.shape[-1])
        y = gemm_w8a8(rows, self.qkv, 1.0, None, self.factors, self.added, 1.0, None, "none", None, torch.int8)
        return tuple(y.view(*x.shape[:-1], -1).chunk(3, -1))


def _joined(module: Any, incompatible: Any) -> None:
    """After another state dict was loaded into the parts."""
    module.join()


class Int8OPTDecoderLayer(nn.Module):
    """OPT's decoder layer in int8; x, the residual stream, stays in the model's dtype."""

    runs_original = False  # whose linear layers are floats
    is_whole = True  # fused models run it as it is; a prompt without padding comes without a mask
    like: Tensor
    dtypes: tuple[torch.dtype, ...]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = self.like.dtype
        super()._apply(fn, recurse)
        if self.like.dtype != before:
            self.dtypes = (*self.dtypes, self.like.dtype)
        return self

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> Tensor:
        """x[B, L, K] -> x[B, L, K]; arguments as of OPTDecoderLayer."""
        parts: Any = self
        caches = {"past_key_values": past_key_values, "cache": kwargs.get("cache")}
        q = parts.self_attn_layer_norm(hidden_states)
        x = parts.self_attn(q, attention_mask=attention_mask, residual=hidden_states, **caches)[0]
        return parts.fc2(parts.fc1(parts.final_layer_norm(x)), x)

    def hand_back(self, original: nn.Module) -> bool:
        """Move and cast the original's parameters as this module was before it is put back."""

        def given(tensor: Tensor) -> Tensor:
            for dtype in self.dtypes:
                tensor = tensor.to(dtype)
            return tensor.to(self.like.device)

        with torch.inference_mode(False), torch.no_grad():
            original._apply(given)
        return False


def int8_layer(layer: nn.Module, tensors: Mapping[str, Tensor]) -> Int8OPTDecoderLayer:
    """The replacement of an OPTDecoderLayer from the tensors of the guide's state dict, by their names in the layer.

    The original may be without weights; it gives sizes, its children's hooks are not taken over.
    """

    def under(name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}."): one for key, one in tensors.items() if key.startswith(f"{name}.")}

    old: Any = layer
    attention = adopt(Int8OPTAttention, old.self_attn)
    for name in QKV:
        attention._modules[name] = W8A8B8O8Linear(under(f"self_attn.{name}"))
    attention._modules["out_proj"] = W8A8BF32OF32Linear(under("self_attn.out_proj"))
    for name in ("qk_bmm", "pv_bmm"):
        attention.add_module(name, StaticInt8(under(f"self_attn.{name}")))
    attention.join()
    attention._load_state_dict_post_hooks = attention._load_state_dict_post_hooks.copy()  # the original keeps its own
    attention.register_load_state_dict_post_hook(_joined)
    new = adopt(Int8OPTDecoderLayer, layer)
    new.dtypes = ()
    like = torch.empty(0, dtype=old.fc1.weight.dtype, device=attention.qkv.device)
    new.register_buffer("like", like, persistent=False)
    new._modules["self_attn"] = attention
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        new._modules[name] = LayerNormQ(under(name), float(getattr(old, name).eps))
    new._modules["fc1"] = W8A8B8O8LinearReLU(under("fc1"))
    new._modules["fc2"] = W8A8BF32OF32Linear(under("fc2"))
    for one, other in (
        (layer, new),
        (old.self_attn, attention),
    ):  # a hook that comes now stays when the original is back
        for name, part in other._modules.items():
            if isinstance(part, StaticInt8) and name in one._modules:
                tables = vars(one._modules[name]).items()
                vars(part).update({table: value for table, value in tables if table.startswith(HOOKED)})
    return new
