"""What a native decode step takes: the weights and constants of each layer, and what all layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from accelpatch.kernels.cpu.native_library import ACTIVATIONS, CROSS
from accelpatch.kernels.cpu.step_experts import StepExperts
from accelpatch.kernels.layouts.cpu_pack import Pack


class NormWeight(NamedTuple):
    """The float32 vector that a norm multiplies by (Gemma: 1 + weight), and its epsilon. layer: whether it is a
    LayerNorm, which may add a bias."""

    weight: Tensor
    eps: float
    layer: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """The weights and constants of one layer, whose sizes are those of its weights.

    linears: a Pack with its bias for each of LINEARS (q k v o gate up down; of a layer with experts the first four; an
    MLP without a gate has no up), and of CROSS where the layer attends to an encoder's tokens, whose scores are
    multiplied by cross_scale.
    norms: by their names in NORMS; missing names are norms that the layer does not have. activation: of ACTIVATIONS, of
    experts of EXPERT_ACTIVATIONS. scale: of attention's scores. window: slots that attention looks back, 0 for all.
    rope: index into the step's rotary frequencies, -1 for no rotation. softcap: of the scores, 0 for none. sinks:
    float32 [heads], each a score without a key. experts: of an MLP of experts, in the place of gate, up and down. post:
    whether attention_norm, cross_norm and mlp_norm are of the sum of a part and its input, not of its input.
    """

    linears: dict[str, Pack]
    norms: dict[str, NormWeight]
    activation: str
    scale: float
    window: int = 0
    rope: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    experts: StepExperts | None = None
    cross_scale: float = 1.0
    post: bool = False

    @property
    def attends_to_encoder(self) -> bool:
        """Whether it has an attention to an encoder's tokens."""
        return CROSS[0] in self.linears

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Name of LINEARS -> (N, K); of experts those of each."""
        held = {name: (pack.n, pack.k) for name, pack in self.linears.items()}
        return held if self.experts is None else held | self.experts.sizes

    def why_not(self, hidden: int, head_dim: int) -> str | None:
        """Why it cannot be part of a step; None where it can."""
        sizes = self.sizes
        if reason := why_not_layer(hidden, head_dim, sizes):
            return reason
        if self.sinks is not None and self.sinks.shape != (heads := sizes["q"][0] // head_dim,):
            return f"its sinks are {list(self.sinks.shape)} for {heads} heads"
        if self.experts is not None:
            return self.experts.why_not(hidden, self.activation)
        return None if self.activation in ACTIVATIONS else f"the native step has no activation {self.activation!r}"

    def kv_heads(self, head_dim: int) -> int:
        """Number of key heads."""
        return self.linears["k"].n // head_dim


@dataclass(frozen=True)
class StepShape:
    """What all layers of a step share.

    rope: (inverse frequencies[head_dim / 2], attention scaling), at most two. softcap: of the logits, 0 for none.
    positions: float32 [P, hidden], of which a token's row is added to its embedding. embedding_norm: of that sum.
    score_bias: makes for a cache of so many slots what is added to the scores of tokens, [heads, length], the last one
    of each head for the token itself, those before for the tokens before it.
    """

    hidden: int
    head_dim: int
    rope: tuple[tuple[Tensor, float], ...]
    embedding_scale: float = 1.0
    softcap: float = 0.0
    positions: Tensor | None = None
    embedding_norm: NormWeight | None = None
    score_bias: Callable[[int], Tensor] | None = None


Sizes = Mapping[str, tuple[int, int]]  # of LINEARS: name -> (N, K)


def why_not_layer(hidden: int, head_dim: int, sizes: Sizes) -> str | None:
    """Why a layer with linear layers of these sizes cannot be part of a step; None where it can."""
    query, key, inner = (sizes[name][0] for name in ("q", "k", "gate"))
    due = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    due |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    across = sizes.get(CROSS[0], (0, hidden))[0]
    due |= {CROSS[0]: (across, hidden), CROSS[1]: (hidden, across)}
    if across % head_dim:
        return f"{across} rows of the q of the attention to the encoder are no heads of {head_dim}"
    for name, size in due.items():
        if sizes.get(name, size) != size:
            got = " x ".join(map(str, sizes[name]))
            return f"its {name} is {got}, and {size[0]} x {size[1]} belongs to its other weights"
    if not query or not key or query % head_dim or key % head_dim or query % key:
        return f"{query} rows of q and {key} of k are no heads of {head_dim} that share key heads evenly"
    return None if head_dim % 2 == 0 else f"its heads have {head_dim} columns, an odd number"
