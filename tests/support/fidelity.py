"""How far a format moves a model's next-token distribution; docs/fidelity.md says what is measured and why."""

from __future__ import annotations

import copy
import pydoc_data.topics
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.quant import int4, int8
from accelpatch.quant.formats import dequantize

#: the embedded model's own grid has blocks of 32 along K: Q4_1 in the layers, Q8_0 in the embedding
BLOCK = 32


GroupSizes = tuple[int | None, ...]


@dataclass(frozen=True)
class Format:
    """bits 8 or 4 of the inner linear layers; `head`: the int8 form of the head and of the embedding tied to it.

    Group sizes run along K: the first that divides K counts, None is a whole row.
    """

    name: str
    bits: int
    group_size: GroupSizes
    symmetric: bool = True
    head: GroupSizes = (128, 64, 32, None)


def first_dividing(sizes: GroupSizes, k: int) -> int | None:
    """The group size for a weight of K features."""
    return next(size for size in sizes if size is None or k % size == 0)


@dataclass(frozen=True)
class Divergence:
    """kl: mean over positions of KL(reference || candidate), nats. top1: share of positions with one best token."""

    kl: float
    top1: float


def noised(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the embedded model with noise added: every linear and embedding weight plus uniform noise.

    The noise of an element is uniform in [-step/2, step/2], step being the grid step of its block of 32 along K.
    """
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in _weights(moved):
        blocks = weight.data.unflatten(1, (-1, BLOCK))
        step = grid_step(blocks, 127 if weight is moved.get_input_embeddings().weight else 15)
        noise = torch.rand(blocks.shape, generator=generator) - 0.5
        weight.data = (blocks + step * noise).flatten(1)
    return moved


def grid_step(blocks: Tensor, levels: int) -> Tensor:
    """step[..., 1] of blocks[..., 32] that lie on a grid: (max - min) / 15 of Q4_1, absmax / 127 of Q8_0."""
    if levels == 127:
        return blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / levels


def _weights(model: nn.Module) -> list[nn.Parameter]:
    """Each linear and embedding weight once, in the order of the tree; a tied one where it is first met."""
    found = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    return list({id(weight): weight for weight in found}.values())


def simulate(model: nn.Module, format: Format) -> nn.Module:
    """A copy whose weights went through `format` and back to float: plain torch modules, no kernel of ours.

    The head is int8 (tied embeddings with it), as in the bundled recipes.
    """
    copied = copy.deepcopy(model)
    head = copied.get_output_embeddings().weight
    for weight in _weights(copied):
        weight.data = _round_trip(weight.data, format, weight is head)
    return copied


def _round_trip(weight: Tensor, format: Format, head: bool) -> Tensor:
    group_size = first_dividing(format.head if head else format.group_size, weight.shape[1])
    if head or format.bits == 8:
        return dequantize(int8.quantize(weight, group_size=group_size), weight.dtype)
    assert group_size is not None
    return dequantize(int4.quantize(weight, group_size=group_size, symmetric=format.symmetric), weight.dtype)


def english_tokens(tokenizer: Any, n: int, window: int = 256) -> Tensor:
    """ids[n / window, window]: the first n tokens of the prose in Python's own language reference (`help()` topics).

    Prose: paragraphs of at least 200 characters that begin at the margin, with no code or list in them.
    """
    paragraphs = []
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        for paragraph in re.split(r"\n\s*\n", topic):
            if len(paragraph) >= 200 and re.fullmatch(r"[A-Z][a-z]*[ ,](.|\n(?=\S))*[.:]", paragraph):
                paragraphs.append(" ".join(paragraph.split()))
    text = "\n\n".join(dict.fromkeys(paragraphs))
    ids = tokenizer(text[: 8 * n], return_tensors="pt").input_ids[0, :n]
    assert ids.numel() == n, f"only {ids.numel()} tokens of prose are here, {n} are needed"
    return ids.view(-1, window)


@torch.inference_mode()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """logits[rows, length, vocabulary], a row of ids at a time."""
    return torch.cat([model(input_ids=row[None], use_cache=False).logits for row in ids])


def mean_kl_top1(reference: Tensor, logits: Tensor) -> Divergence:
    """Both [..., vocabulary]; computed in float64, a block of positions at a time."""
    kl, same, count = 0.0, 0, 0
    for p, q in zip(reference.flatten(0, -2).split(64), logits.flatten(0, -2).split(64), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += p.shape[0]
    return Divergence(kl / count, same / count)


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """exp of the mean negative log likelihood of each row's tokens after its first."""
    nll = [nn.functional.cross_entropy(row[:-1].float(), target[1:]) for row, target in zip(logits, ids, strict=True)]
    return float(torch.stack(nll).mean().exp())


_SIZES: tuple[GroupSizes, ...] = ((128, 64, 32), (64, 32), (32,))
#: the table of docs/fidelity.md
FORMATS = (
    Format("int8, per channel", 8, (None,), head=(None,)),
    *(Format(f"int8, groups of {sizes[0]}", 8, (*sizes, None), head=(*sizes, None)) for sizes in _SIZES),
    *(Format(f"int4, groups of {sizes[0]}, asymmetric", 4, sizes, symmetric=False) for sizes in _SIZES),
    *(Format(f"int4, groups of {sizes[0]}, symmetric", 4, sizes) for sizes in _SIZES),
)
#: the formats of the bundled recipes
RECIPES = {"int8": FORMATS[1], "int4": FORMATS[4]}
