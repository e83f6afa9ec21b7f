"""Splits a float model among the ranks of a job, in place, before it is patched: then each rank patches its part.

Weights are cut as models/sharding.py says, layer by layer. What the modules compute with (numbers of heads) is set to
the rank's part, and hooks add up or gather what the ranks compute (reductions.py). All else is on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelpatch.errors import PatchError
from accelpatch.models.family import Family, child_of, family_of, family_of_class, family_of_layer, linears_of
from accelpatch.models.sharding import COUNTS, HEADS, INNER, KV_HEADS, SPLITS, WHOLE_HEADS, Split
from accelpatch.parallel.cuts import Cuts, cut_of, shape_of, spanned
from accelpatch.parallel.split import Heads, check_world, heads_of, parts, unit_of
from accelpatch.patching.site import WHOLE_K

UP, DOWN = "gate_up_proj", "down_proj"  # of experts


@dataclass(frozen=True)
class LayerParts:
    """What one rank has of one layer. inner: columns of its MLP, () for one of experts alone."""

    heads: Heads
    size: int
    inner: range | None
    experts: range | None = None


class Cutter(Cuts):
    """Cuts a model of the family table."""

    def __init__(self, model: Any, rank: int, world: int, groups: Sequence[int] = ()):
        self.family = known_family(model)
        at = self.family.decoder
        self.decoder: Any = child_of(model, at.path)
        self.layers: Sequence[Any] = getattr(self.decoder, at.layers)
        super().__init__(model, rank, world, groups, getattr(self.decoder, at.embedding), model.get_output_embeddings())
        self.planned = [self._parts_of(layer) for layer in self.layers]
        self.config: Any = None

    def ends(self) -> list[Any]:
        found = []
        for layer in self.layers:
            found += [
                child_of(layer, one) for role, one in linears_of(layer).items() if SPLITS[role].columns is not None
            ]
            found += [one for one in (experts_of(layer),) if one is not None]
        return found

    def described(self) -> list[str]:
        first = self.planned[0]
        columns = (("inner columns", first.inner), ("columns of experts", first.experts))
        return [
            f"query heads {spanned(first.heads.query)}", f"key heads {spanned(first.heads.kv)}",
            *(f"{name} {spanned(one)}" for name, one in columns if one is not None),
        ]  # fmt: skip

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
        self._vocabulary()

    def _linear(self, module: Any, split: Split, part: LayerParts) -> None:
        if split.columns is None:
            ranges = list(self._ranges(split, part, shape_of(module)[0]))
            self._rows(module, ranges)
            return
        columns = _scaled(part.heads.query, part.size) if split.columns == HEADS else part.inner
        assert columns is not None
        self._columns(module, columns)

    def _ranges(self, split: Split, part: LayerParts, total: int) -> Iterable[range]:
        """The rows of a linear layer that this rank has."""
        if self.family.by_head and len(split.parts) > 1:
            return [_scaled(part.heads.query, 3 * part.size)]
        rows: Mapping[str, range | None] = {
            HEADS: _scaled(part.heads.query, part.size), KV_HEADS: _scaled(part.heads.kv, part.size), INNER: part.inner,
        }  # fmt: skip
        config = self.model.config.get_text_config(decoder=True)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        sizes = {HEADS: heads * part.size, KV_HEADS: kv_heads * part.size, INNER: total // len(split.parts)}
        found, start = [], 0
        for what in split.parts:
            one = rows[what]
            assert one is not None
            found.append(range(start + one.start, start + one.stop))
            start += sizes[what]
        return found

    def _experts(self, experts: Any, inner: range) -> None:
        """Cut every expert's gate, up and down by columns; the router is on every rank."""
        transposed = bool(getattr(experts, "is_transposed", False))
        whole = _inner_of(experts)
        both = [inner, range(whole + inner.start, whole + inner.stop)]
        self.undo.set(vars(experts), WHOLE_K, whole)
        self._parameter(experts, UP, cut_of(experts.gate_up_proj.data, 2 if transposed else 1, both))
        self._parameter(experts, DOWN, cut_of(experts.down_proj.data, 1 if transposed else 2, [inner]))
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
            f"{name} cannot be split among ranks: it is no causal model of the family table, and has no tp_plan"
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


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)
