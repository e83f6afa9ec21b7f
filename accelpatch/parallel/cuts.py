"""What every way of splitting a model among ranks has in common: cutting weights in place, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.parallel.split import check_world, parts, unit_of
from accelpatch.patching.site import WHOLE_K


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


class Cuts:
    """Cuts a model for one of `world` ranks. groups: sizes of the groups of columns that the recipe rounds together.

    embedding and head are split among the ranks by rows of the vocabulary: known and logits, of each rank.
    """

    def __init__(self, model: Any, rank: int, world: int, groups: Sequence[int], embedding: Any, head: Any):
        self.model, self.rank, self.world, self.groups, self.undo = model, rank, world, groups, Undo()
        self.embedding, self.head = embedding, head
        self.ties: dict[int, nn.Parameter] = {}
        check_world(len(self.embedding.weight), "rows of the vocabulary", world)
        self.known, self.logits = (
            parts(len(one.weight), unit_of(len(one.weight), world, (16,)), world) for one in (self.embedding, self.head)
        )

    def cut(self) -> None:
        """Cut all weights; `undo` takes it back."""
        raise NotImplementedError

    def ends(self) -> list[Any]:
        """The modules whose outputs are added up over the ranks."""
        raise NotImplementedError

    def described(self) -> list[str]:
        """What this rank has of each layer, for reports."""
        raise NotImplementedError

    def _vocabulary(self) -> None:
        self._rows(self.embedding, [self.known[self.rank]])
        self._rows(self.head, [self.logits[self.rank]])
        self.undo.set(vars(self.embedding), "num_embeddings", len(self.known[self.rank]))
        self.undo.set(vars(self.embedding), "padding_idx", None)  # which counts for gradients alone

    def _columns(self, module: Any, columns: range) -> None:
        """Cut a linear layer whose output is added up."""
        self.undo.set(vars(module), WHOLE_K, shape_of(module)[1])
        self._weight(module, 1, [columns])
        bias = module._parameters.get("bias")
        if bias is not None and self.rank:  # the first rank's is added once
            self._parameter(module, "bias", torch.zeros_like(bias.data))

    def _rows(self, module: Any, ranges: Iterable[range]) -> None:
        ranges = list(ranges)
        self._weight(module, 0, ranges)
        bias = module._parameters.get("bias")
        if bias is not None:
            self._parameter(module, "bias", cut_of(bias.data, 0, ranges))

    def _weight(self, module: Any, dim: int, ranges: Sequence[range]) -> None:
        """Cut the weight [N, K] along one dimension, and the module's own numbers of inputs and outputs."""
        transposed = type(module).__name__ == "Conv1D"
        weight = module._parameters["weight"]
        if weight is None or not weight.is_floating_point() or weight.dim() != 2:
            raise PatchError(f"a {type(module).__name__} without a float weight cannot be split among ranks")
        self._parameter(module, "weight", cut_of(weight.data, 1 - dim if transposed else dim, ranges))
        count = sum(map(len, ranges))
        for name in (("nf",), ("nx",))[dim] if transposed else (("out_features",), ("in_features",))[dim]:
            if hasattr(module, name):
                self.undo.set(vars(module), name, count)

    def _parameter(self, module: Any, name: str, data: Tensor) -> None:
        before = module._parameters[name]
        if id(before) not in self.ties:
            self.ties[id(before)] = nn.Parameter(data, requires_grad=before.requires_grad)
        self.undo.set(module._parameters, name, self.ties[id(before)])


def shape_of(module: Any) -> tuple[int, int]:
    """(N, K) of a float linear layer."""
    rows, columns = module.weight.shape
    return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)


def spanned(part: range) -> str:
    """A range in words, with both ends."""
    return f"{part.start} to {part.stop - 1}"


def cut_of(data: Tensor, dim: int, ranges: Sequence[range]) -> Tensor:
    """A copy of some ranges along one dimension, so that the whole can be freed."""
    cuts = [data.narrow(dim, one.start, len(one)) for one in ranges]
    return torch.cat(cuts, dim) if len(cuts) > 1 else cuts[0].clone(memory_format=torch.contiguous_format)
