"""Splits a model that has no row in the family table as its own `tp_plan` of transformers says.

A plan names linear layers by pattern. Of a colwise one a rank keeps rows of its weight [N, K], and of a rowwise one
columns; what the ranks compute is then added up. Parts are even, as in transformers, so no module counts heads anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from accelpatch.errors import PatchError
from accelpatch.models.family import family_of, family_of_layer
from accelpatch.models.sharding import WHOLE_HEADS
from accelpatch.parallel.cuts import Cuts, shape_of, spanned
from accelpatch.parallel.shards import Cutter
from accelpatch.parallel.split import parts

COLWISE, ROWWISE = "colwise", "rowwise"
WHOLE = ("replicate", "replicated_with_grad_allreduce")  # on every rank; the second differs in training alone
#: of embedding and head, which are split by rows of the vocabulary in any case
VOCABULARY = ("embedding_rowwise", "colwise_gather_output", "colwise_rep", COLWISE, ROWWISE)


def cutter_of(model: Any, rank: int, world: int, groups: Sequence[int] = ()) -> Cuts:
    """What cuts a model: by the family table, or for one without a row there by its tp_plan, where it has one.

    Raises PatchError for a model that cannot be split.
    """
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if family_of(getattr(model, "config", None)) is None and causal and plan_of(model):
        return PlanCutter(model, rank, world, groups)
    return Cutter(model, rank, world, groups)


def plan_of(model: Any) -> Mapping[str, str]:
    """The model's tp_plan: pattern of a module's or parameter's name -> how it is split."""
    return dict(getattr(model, "_tp_plan", None) or {})


class PlanCutter(Cuts):
    """Cuts a model by its tp_plan. Raises PatchError for an entry of it that is not known here."""

    def __init__(self, model: Any, rank: int, world: int, groups: Sequence[int] = ()):
        self.name = type(model).__name__
        super().__init__(model, rank, world, groups, model.get_input_embeddings(), model.get_output_embeddings())
        self.linears = {name: kind for name, kind in self._entries() if kind not in WHOLE}
        self._check_layers()
        self._check_heads()

    def _refuse(self, why: str) -> PatchError:
        return PatchError(f"{self.name} cannot be split among ranks by its tp_plan: {why}")

    def _entries(self) -> list[tuple[str, str]]:
        """(module's name, kind) of all modules but embedding and head that the plan names."""
        found, plan = [], plan_of(self.model)
        modules = dict(self.model.named_modules())
        for shown, kind in plan.items():
            pattern = re.compile(re.escape(shown).replace(r"\*", r"\d+"))
            for name, module in modules.items():
                if not pattern.fullmatch(name):
                    continue
                if module is self.embedding or module is self.head:
                    if kind not in VOCABULARY:
                        raise self._refuse(f"{name} is {kind}, which is not known here")
                    continue
                if kind not in (COLWISE, ROWWISE, *WHOLE):
                    raise self._refuse(f"{name} is {kind}; known are {COLWISE} and {ROWWISE} linear layers")
                if kind not in WHOLE and not isinstance(module, nn.Linear):
                    raise self._refuse(f"{name} is {kind}, and a {type(module).__name__} is no nn.Linear")
                found.append((name, kind))
            if kind not in (COLWISE, ROWWISE, *WHOLE, *VOCABULARY) and any(
                pattern.fullmatch(name) for name, _ in self.model.named_parameters()
            ):
                raise self._refuse(f"the parameters {shown} are {kind}, which is not known here")
        return found

    def _check_layers(self) -> None:
        """Raise PatchError where what colwise layers compute is not added up by a rowwise one, or parts are uneven."""
        kinds_of: dict[str, set[str]] = {}
        for name, kind in self.linears.items():
            kinds_of.setdefault(name.rpartition(".")[0], set()).add(kind)
            total = shape_of(self.model.get_submodule(name))[kind == ROWWISE]
            if total % self.world:
                raise self._refuse(f"the {total} outputs or inputs of {name} are no multiple of {self.world}")
        if not kinds_of:
            raise self._refuse("it names no linear layer")
        for parent, kinds in kinds_of.items():
            if kinds != {COLWISE, ROWWISE}:
                raise self._refuse(f"{parent} has no {({COLWISE, ROWWISE} - kinds).pop()} layer")

    def _check_heads(self) -> None:
        """Raise PatchError where ranks would have parts of heads, or modules read numbers that are not set here."""
        config = self.model.config.get_text_config(decoder=True)
        for what in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, what, None)
            if heads is not None and int(heads) % self.world:
                raise self._refuse(f"{what}, {heads}, is no multiple of {self.world}")
        for name, module in self.model.named_modules():
            if (why := WHOLE_HEADS.get(name.rpartition(".")[2])) is not None:
                raise self._refuse(why)
            if (family := family_of_layer(module)) is not None:
                raise self._refuse(f"{name} is a layer of the family {family.classes}, and the model is not")

    def cut(self) -> None:
        for name, kind in self.linears.items():
            module = self.model.get_submodule(name)
            total = shape_of(module)[kind == ROWWISE]
            mine = parts(total, 1, self.world)[self.rank]
            if kind == COLWISE:
                self._rows(module, [mine])
            else:
                self._columns(module, mine)
        self._vocabulary()

    def ends(self) -> list[Any]:
        return [self.model.get_submodule(name) for name, kind in self.linears.items() if kind == ROWWISE]

    def described(self) -> list[str]:
        """As its tp_plan says, the first layer's columns."""
        found: dict[str, str] = {}
        for name, kind in self.linears.items():
            parent, _, last = name.rpartition(".")
            module = self.model.get_submodule(name)
            size = shape_of(module)[kind == ROWWISE]
            part = range(self.rank * size, (self.rank + 1) * size)
            what = "rows" if kind == COLWISE else "columns"
            found.setdefault(f"{parent.rpartition('.')[2]}.{last}", f"{what} {spanned(part)}")
        return [f"{part} of {name}" for name, part in found.items()]
