"""Changes to a Llama-like model of which its layers, embedding or head come out in other sizes, or as other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.tiny import HIDDEN, INNER, VOCABULARY

Change = Callable[[Any], None]


def _linear(n: int, k: int) -> nn.Linear:
    torch.manual_seed(n + 1000 * k)
    made = nn.Linear(k, n, bias=False)
    nn.init.normal_(made.weight, std=k**-0.5)
    return made


def _head(n: int) -> Change:
    """Another head, of which greedy decoding chooses no token that the embedding has no row for."""

    def change(model: Any) -> None:
        head = _linear(n, HIDDEN)
        head.weight.data[VOCABULARY:].mul_(0.01)
        model.set_output_embeddings(head)

    return change


def _embedding(n: int) -> Change:
    return lambda model: model.set_input_embeddings(nn.Embedding.from_pretrained(_linear(n, HIDDEN).weight.detach()))


def _heads(queries: int, keys: int, size: int = 16) -> Change:
    """Fewer heads in the first layer, which still has as many query heads a key head as its attention says."""

    def change(model: Any) -> None:
        attention = model.model.layers[0].self_attn
        attention.q_proj = _linear(queries * size, HIDDEN)
        attention.k_proj, attention.v_proj = _linear(keys * size, HIDDEN), _linear(keys * size, HIDDEN)
        attention.o_proj = _linear(HIDDEN, queries * size)
        attention.num_key_value_groups = queries // keys

    return change


def _inner(n: int) -> Change:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = _linear(n, HIDDEN), _linear(n, HIDDEN), _linear(HIDDEN, n)

    return change


def _low_rank(path: str, n: int, k: int) -> Change:
    return lambda model: model.set_submodule(path, nn.Sequential(_linear(8, k), _linear(n, 8)))


SIZES: dict[str, Change] = {
    "larger-head": _head(VOCABULARY + 40),
    "smaller-head": _head(VOCABULARY - 32),
    "larger-embedding": _embedding(VOCABULARY + 40),
    "smaller-embedding": _embedding(VOCABULARY - 3),
    "pruned-heads": _heads(2, 1),
    "one-key-head": _heads(4, 1),
    "as-many-key-heads": _heads(4, 4),
    "more-heads": _heads(6, 2),
    "pruned-mlp": _inner(INNER - 32),
    "wider-mlp": _inner(INNER + 32),
}
#: (place of the layer that runs its modules then, change): modules of another kind in the place of a linear layer
OTHERS: dict[str, tuple[int, Change]] = {
    "low-rank-gate": (0, _low_rank("model.layers.0.mlp.gate_proj", INNER, HIDDEN)),
    "low-rank-up": (0, _low_rank("model.layers.0.mlp.up_proj", INNER, HIDDEN)),
    "low-rank-down": (1, _low_rank("model.layers.1.mlp.down_proj", HIDDEN, INNER)),
    "low-rank-q": (0, _low_rank("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN)),
    "low-rank-o": (1, _low_rank("model.layers.1.self_attn.o_proj", HIDDEN, HIDDEN)),
}
