"""Groups of activation smoothing that several families have in common; rows of families.py name them.

Norm to q, k and v; v to o; norm to gate and up; up to down. A layer norm's bias and a linear layer's are divided with
it. What an activation separates, other than ReLU, is no group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelpatch.models.form import Smoothing

TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_AND_UP = ("mlp.gate_proj", "mlp.up_proj")
READ, READ_BEFORE_MLP = Smoothing(TWO_NORMS[0], QKV), Smoothing(TWO_NORMS[1], GATE_AND_UP)
VALUES = Smoothing("self_attn.v_proj", ("self_attn.o_proj",))
UP = Smoothing("mlp.up_proj", ("mlp.down_proj",))
BEHIND = (VALUES, UP)  # what smooths o and down, where no norm is before q, k, v, gate and up
LLAMA_SMOOTHING = (READ, VALUES, READ_BEFORE_MLP, UP)
GEMMA_SMOOTHING = (READ, VALUES, Smoothing("pre_feedforward_layernorm", GATE_AND_UP), UP)
_OF_TWO = (Smoothing(TWO_NORMS[1], ("mlp.gate_up_proj",)), Smoothing("mlp.gate_up_proj", ("mlp.down_proj",)))
GATE_UP_SMOOTHING = (READ, VALUES, *_OF_TWO)
PHI3_SMOOTHING = (
    Smoothing("input_layernorm", ("self_attn.qkv_proj",)),
    Smoothing("self_attn.qkv_proj", ("self_attn.o_proj",)),
    *_OF_TWO,
)
STABLELM_SMOOTHING = (
    replace(READ, where={"use_parallel_residual": False}),
    VALUES,
    replace(READ_BEFORE_MLP, where={"use_parallel_residual": False}),
    UP,
    Smoothing("input_layernorm", (*QKV, *GATE_AND_UP), {"use_parallel_residual": True}),
)
COHERE_SMOOTHING = (Smoothing("input_layernorm", (*QKV, *GATE_AND_UP)), *BEHIND)
MOE_SMOOTHING = (READ, VALUES)
# The dense layers of such a model; in sparse ones a router and experts read the second norm.
SOME_DENSE = (*MOE_SMOOTHING, READ_BEFORE_MLP, UP)


def by_one(attention: str, qkv: str, o: str, norms: tuple[str, str], fc1: str, **where: Any) -> tuple[Smoothing, ...]:
    """The groups of layers with one linear layer of q, k and v, and a plain MLP, which its activation separates."""
    return (
        Smoothing(norms[0], (f"{attention}.{qkv}",), where),
        Smoothing(f"{attention}.{qkv}", (f"{attention}.{o}",)),
        Smoothing(norms[1], (fc1,), where),
    )
