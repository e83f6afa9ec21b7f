"""Splits a float model among the ranks of a job, in place, before it is patched: then each rank patches its part.

Weights are cut as models/sharding.py says, layer by layer. What the modules compute with (numbers of heads) is set to
the rank's part, and hooks add up or gather what the ranks compute (reductions.py). All else is on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.models.family import Family, child_of, family_of, family_of_class, family_of_layer, linears_of
from accelpatch.models.sharding import COUNTS, HEADS, INNER, KV_HEADS, SPLITS, WHOLE_HEADS, Split
from accelpatch.parallel.split import Heads, check_world, heads_of, parts, unit_of
from accelpatch.patching.site import WHOLE_K

UP, DOWN = "gate_up_proj", "down_proj"  # of experts


@dataclass
class Undo:
    """Every change to a model, so that all of them can be taken back."""

    steps: list[Callable[[], Any]] = field(default_factory=list)

    def set(self, table: dict[str, Any], name: str, value: Any) -> None:
        """table[name] = value."""
        if name in table:
            self.steps.append(lambda before=table[name]: table.__setitem__(name, before))  # type: ignore[misc]
        else:
            self.steps.append(lambda: table.pop(name, None))
        table[name] = value

    def back(self) -> None:
        """Take all changes back, the last one first."""
        while self.steps:
            self.steps.pop()()


@dataclass(frozen=True)
class LayerParts:
    """What one rank has of one layer. inner: columns of its MLP, () for one of experts alone."""

    heads: Heads
    size: int
    inner: range | None
    experts: range | None = None


class Cutter:
    """Cuts a model for one of `world` ranks. groups: sizes of the groups of columns that the recipe rounds together."""

    def __init__(self, model: Any, rank: int, world: int, groups: Sequence[int] = ()):
        self.model, self.rank, self.world, self.groups, self.undo = model, rank, world, groups, Undo()
        self.family = known_family(model)
        at = self.family.decoder
        self.decoder: Any = child_of(model, at.path)
        self.layers: Sequence[Any] = getattr(self.decoder, at.layers)
        self.embedding: Any = getattr(self.decoder, at.embedding)
        self.head: Any = model.get_output_embeddings()
        self.ties: dict[int, nn.Parameter] = {}
        self.planned = [self._parts_of(layer) for layer in self.layers]
        check_world(len(self.embedding.weight), "rows of the vocabulary", world)
        self.known, self.logits = (
            parts(len(one.weight), unit_of(len(one.weight), world, (16,)), world) for one in (self.embedding, self.head)
        )  # rows of each rank
        self.config: Any = None

    def _attention(self, layer: Any) -> Any:
        form = family_of_layer(layer)
        assert form is not None
        assert form.layer is not None
        return getattr(layer, form.layer.attention)

    def _parts_of(self, layer: Any) -> LayerParts:
        """This rank's part of a layer. Raises PatchError where it cannot be split."""
        attention, roles = self._attention(layer), linears_of(layer)
        config = self.model.config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        for name, why in WHOLE_HEADS.items():
            if child_of(attention, name) is not None:
                raise PatchError(f"{type(self.model).__name__} cannot be split among ranks: {why}")
        if "o_proj" not in roles:
            raise PatchError(f"{type(self.model).__name__} cannot be split among ranks: attention has no known output")
        size = shape_of(child_of(layer, roles["o_proj"]))[1] // heads
        inner = next(
            (shape_of(child_of(layer, roles[role]))[1] for role in ("down_proj", "fc2") if role in roles), None
        )
        sparse = experts_of(layer)
        return LayerParts(
            heads_of(heads, kv_heads, self.world)[self.rank], size,
            None if inner is None else self._inner(inner),
            None if sparse is None else self._inner(_inner_of(sparse)),
        )  # fmt: skip

    def _inner(self, total: int) -> range:
        check_world(total, "inner columns of its MLP", self.world)
        return parts(total, unit_of(total, self.world, self.groups), self.world)[self.rank]

    def cut(self) -> None:
        """Cut all weights; `undo` takes it back."""
        for layer, part in zip(self.layers, self.planned, strict=True):
            for role, name in linears_of(layer).items():
                self._linear(child_of(layer, name), SPLITS[role], part)
            if part.experts is not None:
                self._experts(experts_of(layer), part.experts)
            self._count(self._attention(layer), part)
        self._rows(self.embedding, [self.known[self.rank]])
        self._rows(self.head, [self.logits[self.rank]])
        self.undo.set(vars(self.embedding), "num_embeddings", len(self.known[self.rank]))
        self.undo.set(vars(self.embedding), "padding_idx", None)  # which counts for gradients alone

    def _linear(self, module: Any, split: Split, part: LayerParts) -> None:
        if split.columns is None:
            ranges = list(self._ranges(split, part, shape_of(module)[0]))
            self._rows(module, ranges)
            return
        columns = _scaled(part.heads.query, part.size) if split.columns == HEADS else part.inner
        assert columns is not None
        self.undo.set(vars(module), WHOLE_K, shape_of(module)[1])
        self._weight(module, 1, [columns])
        bias = module._parameters.get("bias")
        if bias is not None and self.rank:  # the first rank's is added once
            self._parameter(module, "bias", torch.zeros_like(bias.data))

    def _ranges(self, split: Split, part: LayerParts, total: int) -> Iterable[range]:
        """The rows of a linear layer that this rank has."""
        if self.family.by_head and len(split.parts) > 1:
            return [_scaled(part.heads.query, 3 * part.size)]
        held: Mapping[str, range | None] = {
            HEADS: _scaled(part.heads.query, part.size), KV_HEADS: _scaled(part.heads.kv, part.size), INNER: part.inner,
        }  # fmt: skip
        config = self.model.config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        sizes = {HEADS: heads * part.size, KV_HEADS: kv_heads * part.size, INNER: total // len(split.parts)}
        found, start = [], 0
        for what in split.parts:
            one = held[what]
            assert one is not None
            found.append(range(start + one.start, start + one.stop))
            start += sizes[what]
        return found

    def _rows(self, module: Any, ranges: Iterable[range]) -> None:
        ranges = list(ranges)
        self._weight(module, 0, ranges)
        bias = module._parameters.get("bias")
        if bias is not None:
            self._parameter(module, "bias", _cut(bias.data, 0, ranges))

    def _weight(self, module: Any, dim: int, ranges: Sequence[range]) -> None:
        """Cut the weight [N, K] along one dimension, and the module's own numbers of inputs and outputs."""
        transposed = type(module).__name__ == "Conv1D"
        weight = module._parameters["weight"]
        if weight is None or not weight.is_floating_point() or weight.dim() != 2:
            raise PatchError(f"a {type(module).__name__} without a float weight cannot be split among ranks")
        self._parameter(module, "weight", _cut(weight.data, 1 - dim if transposed else dim, ranges))
        count = sum(map(len, ranges))
        for name in (("nf",), ("nx",))[dim] if transposed else (("out_features",), ("in_features",))[dim]:
            if hasattr(module, name):
                self.undo.set(vars(module), name, count)

    def _parameter(self, module: Any, name: str, data: Tensor) -> None:
        before = module._parameters[name]
        if id(before) not in self.ties:
            self.ties[id(before)] = nn.Parameter(data, requires_grad=before.requires_grad)
        self.undo.set(module._parameters, name, self.ties[id(before)])

    def _experts(self, experts: Any, inner: range) -> None:
        """Cut every expert's gate, up and down by columns; the router is on every rank."""
        transposed = bool(getattr(experts, "is_transposed", False))
        whole = _inner_of(experts)
        both = [inner, range(whole + inner.start, whole + inner.stop)]
        self.undo.set(vars(experts), WHOLE_K, whole)
        self._parameter(experts, UP, _cut(experts.gate_up_proj.data, 2 if transposed else 1, both))
        self._parameter(experts, DOWN, _cut(experts.down_proj.data, 1 if transposed else 2, [inner]))
        for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
            if vars(experts).get(name) == whole:
                self.undo.set(vars(experts), name, len(inner))

    def _count(self, attention: Any, part: LayerParts) -> None:
        """Set what an attention module counts to this rank's part."""
        heads, kv_heads = len(part.heads.query), len(part.heads.kv)
        counts = {HEADS: heads, KV_HEADS: kv_heads, "groups": heads // kv_heads, "columns": heads * part.size}
        for name, what in COUNTS.items():
            if name in vars(attention):
                self.undo.set(vars(attention), name, counts[what])
        self.undo.set(vars(attention), "head_dim", part.size)
        if "qkv_proj" not in linears_of_attention(attention, self.layers):
            return
        if self.config is None:  # families with one linear layer of q, k and v read the numbers off it
            self.config = copy.copy(attention.config)
            self.config.num_attention_heads = heads
            if getattr(attention.config, "num_key_value_heads", None) is not None:
                self.config.num_key_value_heads = kv_heads
            self.undo.set(vars(self.decoder), "config", self.config)
        self.undo.set(vars(attention), "config", self.config)


def known_family(model: Any) -> Family:
    """The family of a causal language model that can be split. Raises PatchError for any other."""
    name, config = type(model).__name__, getattr(model, "config", None)
    family = family_of(config)
    causal = any(family_of_class(model, ending) is not None for ending in ("ForCausalLM", "LMHeadModel"))
    if family is None or not causal:
        raise PatchError(
            f"{name} is no causal language model of the family table, and only those are split among ranks"
        )
    if family.unsharded is not None:
        raise PatchError(f"{name} cannot be split among ranks: {family.unsharded}")
    return family


def linears_of_attention(attention: Any, layers: Sequence[Any]) -> Mapping[str, str]:
    """The roles of the linear layers of the layer that an attention module is part of."""
    return next(linears_of(layer) for layer in layers if any(one is attention for one in layer.children()))


def experts_of(layer: Any) -> Any:
    """The experts of a decoder layer; None where it has none."""
    family = family_of_layer(layer)
    if family is None or family.sparse is None or family.layer is None or family.layer.mlp is None:
        return None
    return child_of(layer, f"{family.layer.mlp}.{family.sparse.experts}")


def _inner_of(experts: Any) -> int:
    return int(experts.down_proj.shape[1 if getattr(experts, "is_transposed", False) else 2])


def shape_of(module: Any) -> tuple[int, int]:
    """(N, K) of a float linear layer."""
    rows, columns = module.weight.shape
    return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _cut(data: Tensor, dim: int, ranges: Sequence[range]) -> Tensor:
    """A copy of some ranges along one dimension, so that the whole can be freed."""
    held = [data.narrow(dim, one.start, len(one)) for one in ranges]
    return torch.cat(held, dim) if len(held) > 1 else held[0].clone(memory_format=torch.contiguous_format)
