"""The loss of a causal language model over chunks of its tokens, in training: the logits of only one chunk exist at a
time.

    loss = sum over tokens of cross_entropy(cap(head(h) / divisor), next token) / their number

Each chunk's gradient is taken while its logits are there, so that the backward pass computes none again. Tokens without
a label do not reach the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.decoder import ENDINGS, Decoder, decoder_of
from accelpatch.models.family import family_of_class
from accelpatch.modules.replacement import is_observed

LOGITS = 1 << 24  # of a chunk: 64 MiB in float32
FIRST = 64  # rows of the first chunk, which shows how many logits a row has
IGNORED = -100
#: arguments of a call that the decoder does not get
OF_LOSS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict")


def outputs(model: Any, given: Mapping[str, Any]) -> CausalLMOutputWithPast | None:
    """The outputs of a call in training mode that has labels, without logits; None where the model's own forward must
    run. given: the call's arguments by name."""
    if given.get("labels") is None or not model.training or not torch.is_grad_enabled():
        return None
    decoder = _decoder(model, given)
    if decoder is None:
        return None
    rest = {name: value for name, value in given.items() if name not in OF_LOSS}
    hidden = decoder.module(**rest)[0]
    labels = given.get("shift_labels")
    if labels is None:
        labels = functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]
    return CausalLMOutputWithPast(loss=_mean(decoder, hidden, labels, given.get("num_items_in_batch")))


def _decoder(model: Any, given: Mapping[str, Any]) -> Decoder | None:
    """The model's decoder where its loss is the plain one of its head's outputs; None where it may be another."""
    asked = ("output_hidden_states", "output_attentions", "output_router_logits")
    if any(given.get(name) or getattr(model.config, name, False) for name in asked):
        return None
    if given.get("logits_to_keep") or given.get("return_dict") is False or model.loss_function is not ForCausalLMLoss:
        return None
    if not any(family_of_class(model, ending) for ending in ENDINGS):  # its logits may be scaled
        return None
    try:
        decoder = decoder_of(model)
    except CannotFuse:
        return None
    return None if is_observed(decoder.head) else decoder


def _mean(decoder: Decoder, hidden: Tensor, labels: Tensor, items: Any) -> Tensor:
    """The loss of hidden[..., K] with labels[...], IGNORED where there is none.

    items: by what the sum is divided, the tokens in all batches of an optimiser's step; None: those here.
    """
    flat, due = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    kept = (due != IGNORED).nonzero()[:, 0]
    rows = flat.index_select(0, kept)

    def logits(x: Tensor) -> Tensor:
        y = decoder.head(x).float() / decoder.logit_divisor
        return decoder.logit_cap * (y / decoder.logit_cap).tanh() if decoder.logit_cap else y

    trained = [one for one in decoder.head.parameters() if one.requires_grad]
    total = chunked_cross_entropy(logits, rows, due[kept], trained)
    count = len(kept) if items is None else items
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def chunked_cross_entropy(
    logits: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, trained: list[nn.Parameter], chunk: int | None = None
) -> Tensor:
    """The sum of the cross entropies of logits(x[M, K]), float [M, V], with labels[M], as one float32.

    trained: parameters of `logits` that ask for a gradient. chunk: rows at once; None: as many as LOGITS allows.
    """
    loss: Tensor = _Chunked.apply(logits, labels, chunk, x, *trained)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Callable[[Tensor], Tensor], labels: Tensor, chunk: int | None, x: Tensor, *trained: Tensor
    ) -> Tensor:
        total, of_x = x.new_zeros((), dtype=torch.float32), torch.zeros_like(x)
        of_trained = [torch.zeros_like(one) for one in trained]
        start = 0
        step = chunk or FIRST
        while start < len(x):
            rows = slice(start, start + step)
            with torch.enable_grad():
                part = x[rows].detach().requires_grad_()
                made = logits(part)
                loss = functional.cross_entropy(made, labels[rows], reduction="sum")
            found = torch.autograd.grad(loss, [part, *trained], materialize_grads=True)
            total, of_x[rows] = total + loss.detach(), found[0]
            for one, more in zip(of_trained, found[1:], strict=True):
                one += more
            start, step = start + step, chunk or max(1, LOGITS // made.shape[-1])
        ctx.save_for_backward(of_x, *of_trained)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (of_loss,) = upstream
        return None, None, None, *(one * of_loss.to(one.dtype) for one in ctx.saved_tensors)
