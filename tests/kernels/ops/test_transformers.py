"""The plain torch implementations are transformers' own modules to the bit, so `exact` rounds nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated_activation
from accelpatch.kernels.ops.activation.gated_activation import reference as gated_reference
from accelpatch.kernels.ops.attention.rope import rotary_cos_sin
from accelpatch.kernels.ops.norm.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_add
from tests.support.parity import DTYPES, bits, name

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def hidden(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 7, 65), (0, 64), (129, 96)], ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("kind, plus_one", [(LlamaRMSNorm, False), (Gemma2RMSNorm, True)], ids=["llama", "gemma2"])
def test_rmsnorm(kind: type, plus_one: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm = kind(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data = hidden(dtype, shape[-1])
    x, residual = hidden(dtype, *shape), hidden(dtype, *shape).flip(-1)
    with torch.inference_mode():
        assert same(rmsnorm(x, norm.weight, 1e-5, plus_one), norm(x))
        y, total = add_rmsnorm(x, residual, norm.weight, 1e-5, plus_one)
        assert same(total, x + residual)
        assert same(y, norm(x + residual))
        assert same(rmsnorm_add(x, residual, norm.weight, 1e-5, plus_one), residual + norm(x))


@pytest.mark.parametrize("kind, plus_one", [(LlamaRMSNorm, False), (Gemma2RMSNorm, True)], ids=["llama", "gemma2"])
def test_rmsnorm_with_a_float32_weight(kind: type, plus_one: bool) -> None:
    norm = kind(64, eps=1e-5)
    norm.weight.data = hidden(torch.float32, 64)
    x = hidden(torch.bfloat16, 3, 64)
    with torch.inference_mode():
        assert same(rmsnorm(x, norm.weight, 1e-5, plus_one), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(
    "parameters", [{"rope_type": "default", "rope_theta": 10000.0}, LLAMA3, YARN], ids=lambda value: value["rope_type"]
)
@pytest.mark.parametrize("length", [1, 7, 129])
def test_rotary(parameters: dict[str, float], length: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=dict(parameters), max_position_embeddings=8192
    )
    rotary = LlamaRotaryEmbedding(config)
    position_ids = torch.stack((torch.arange(length), torch.arange(length) + 8000))
    cos, sin = rotary_cos_sin(position_ids, rotary.inv_freq, rotary.attention_scaling, dtype)
    due = rotary(torch.zeros(1, dtype=dtype), position_ids)
    assert same(cos, due[0])
    assert same(sin, due[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("activation", [key for key in ACTIVATIONS if key != "gelu_tanh"])
def test_gated_mlp(activation: str, dtype: torch.dtype) -> None:
    mlp = LlamaMLP(
        LlamaConfig(hidden_size=65, num_attention_heads=13, head_dim=6, intermediate_size=33, hidden_act=activation)
    ).to(dtype)
    assert mlp.act_fn is not None
    x = hidden(dtype, 2, 7, 65)
    with torch.inference_mode():
        inner = gated_activation(mlp.gate_proj(x), mlp.up_proj(x), activation)
        assert same(mlp.down_proj(inner), mlp(x))


def test_gelu_tanh_is_gelu_pytorch_tanh() -> None:
    x = hidden(torch.float32, 3, 65)
    assert same(gated_activation(x, torch.ones_like(x), "gelu_tanh"), ACT2FN["gelu_pytorch_tanh"](x))


FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x / 2 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_pytorch_tanh": lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_the_published_formula(activation: str) -> None:
    points = [-6.0, -1.5, -0.1, 0.0, 0.3, 2.0, 7.0]
    gate = torch.tensor(points, dtype=torch.float64)
    found = gated_reference(gate, torch.full_like(gate, 2.0), activation)
    due = torch.tensor([2 * FORMULAS[activation](point) for point in points], dtype=torch.float64)
    assert torch.allclose(found, due, rtol=1e-12, atol=1e-14)
