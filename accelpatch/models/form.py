"""What a row of the family table says: roles, and the forms of norms, layers and rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Norm:
    """A family's RMSNorm: the name of its epsilon attribute, and whether it multiplies by 1 + weight (plus_one).

    late: it multiplies by the weight before it rounds. Our kernels round before, so that norms are one rounding apart;
    layers then add the residual and normalise as the original does. layer: it is a LayerNorm, which subtracts the mean
    and may have a bias.
    """

    eps: str = "variance_epsilon"
    plus_one: bool = False
    late: bool = False
    layer: bool = False


@dataclass(frozen=True)
class LayerForm:
    """What a decoder layer computes, by the names of its children and attributes; it can be fused.

        x = x + m after_attention(attention(attention_norm(x)))
        x = x + m after_mlp(mlp(mlp_norm(x)))

    A norm is None where the family has none there. multiplier: attribute of the layer that holds m; None: m is 1.
    parallel: the MLP's norm reads the layer's input, not the sum after attention; the name of an attribute of the layer
    where that says so. Both places may name one norm. mlp: None where the layer itself holds the MLP's linear layers.
    where: the name of an attribute of the layer without which it has another form. cache: what its argument for the
    KV cache is called; None: as in other families.
    """

    attention: str = "self_attn"
    mlp: str | None = "mlp"
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None
    multiplier: str | None = None
    parallel: bool | str = False
    where: str | None = None
    cache: str | None = None

    def of(self, layer: Any) -> LayerForm:
        """The form of one layer by its own attributes; a parallel layer's only norm is that of its MLP too."""
        parallel = bool(getattr(layer, self.parallel)) if isinstance(self.parallel, str) else self.parallel
        lone = parallel and self.mlp_norm is not None and getattr(layer, self.mlp_norm, None) is None
        return replace(self, parallel=parallel, mlp_norm=self.attention_norm if lone else self.mlp_norm)

    @property
    def norms(self) -> Mapping[str, str]:
        """Place of a norm, such as mlp_norm -> name of the child; without the places that have none."""
        places = ("attention_norm", "after_attention", "mlp_norm", "after_mlp")
        return {place: name for place in places if (name := getattr(self, place)) is not None}

    @property
    def children(self) -> frozenset[str]:
        """Names of the children that a layer calls."""
        return frozenset({self.attention, *self.norms.values()} | ({self.mlp} if self.mlp else set()))


@dataclass(frozen=True)
class Sparse:
    """An MLP of experts, by the names of its children: what a router's softmax chooses, k of E for each token.

    chosen: attribute of the router that holds k. normalise: whether the k weights are divided by their sum, or the name
    of an attribute of the router that says so. narrow: whether they are rounded to the model's dtype. block: how the
    name of the MLP's class ends. bias: whether the router has one.
    """

    router: str = "gate"
    experts: str = "experts"
    chosen: str = "top_k"
    normalise: bool | str = True
    narrow: bool = False
    block: str = "SparseMoeBlock"
    bias: bool = False


@dataclass(frozen=True)
class Rotary:
    """A family's rotary embedding. tables: what its tables are where they have another form than Llama's: "float32"
    where others have the hidden states' dtype, "paired" where equal columns are neighbours, "axes" where each frequency
    belongs to an axis of the positions, one section of frequencies an axis, "cyclic axes" where the next frequency
    belongs to the next axis (of text all axes have one value, and the tables are Llama's), "half" where they hold each
    frequency once. Such a module stays.

    interleaved: pairs neighbouring columns (2 i, 2 i + 1) of a head; others pair i with i + R / 2. without: name of an
    attribute of attention layers that is false where a layer applies none.
    """

    tables: str | None = None
    interleaved: bool = False
    without: str | None = None


@dataclass(frozen=True)
class DecoderForm:
    """Where a causal language model has its decoder, and names of the decoder's children.

    positions: of learned embeddings of positions, added to those of tokens; position p is row p + offset. of_mask:
    where the caller gives no positions, they count the tokens that are not masked; else all tokens.
    """

    path: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    positions: str | None = None
    offset: int = 0
    of_mask: bool = False


@dataclass(frozen=True)
class Smoothing:
    """A group of activation smoothing within a layer: all linear layers that read what a norm or a linear layer makes.

    source, consumers: dotted names in the layer. Of one linear layer of q, k and v, or gate and up, the source is what
    the next linear layer reads: its values, its second half. where: attributes of the configuration, and the values
    that they must have for this to be so.
    """

    source: str
    consumers: tuple[str, ...]
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One model family.

    name: its model_type in transformers. also: further ones. roles: pattern -> role; a pattern is a glob over dotted
    names with numbers written `#` (`model.layers.3.mlp` is `model.layers.#.mlp`). smoothing: the groups in a layer.

    classes: what its classes' names begin with, such as Llama in LlamaAttention. norm: its RMSNorm. layer: the form of
    its decoder layers. rotary: its rotary embedding, where the tables hold each half's frequencies twice over.
    q_k_norm: what q_norm and k_norm are over: each `head`, or `all` heads of a token. capped_scores, capped_logits:
    whether it applies the softcaps of its configuration; scores only in eager attention. embedding_multiplier:
    attribute of its decoder by which embeddings are multiplied. logit_divisor: the same of its configuration, by which
    logits are divided; logit_multiplier: by which they are multiplied. by_head: whether the one linear layer of q, k
    and v has its rows head by head, q, k and v of each. decoder: where it lies. sparse: the form of its MLPs of
    experts. unfused: why no layer of the family is fused; None also where that is simply not known of its layers.
    unsharded: why tensor parallel does not split it.
    """

    name: str
    roles: Mapping[str, str]
    smoothing: tuple[Smoothing, ...] = ()
    classes: str = ""
    norm: Norm | None = None
    layer: LayerForm | None = None
    rotary: Rotary | None = None
    q_k_norm: str = "head"
    capped_scores: bool = False
    capped_logits: bool = False
    embedding_multiplier: str | None = None
    logit_divisor: str | None = None
    logit_multiplier: str | None = None
    by_head: bool = False
    decoder: DecoderForm = DecoderForm()
    sparse: Sparse | None = None
    unfused: str | None = None
    unsharded: str | None = None
    also: tuple[str, ...] = ()

    @property
    def model_types(self) -> tuple[str, ...]:
        """All its names in transformers."""
        return (*self.also, self.name)
