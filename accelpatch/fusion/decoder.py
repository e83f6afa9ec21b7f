"""A causal language model's decoder: its layers, embeddings, last norm and head, by the names of its family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.rotary import rotary_why_not
from accelpatch.models.family import DecoderForm, Family, child_of, family_of_class
from accelpatch.models.multimodal import is_multimodal, language_model, logit_cap

ENDINGS = ("ForCausalLM", "LMHeadModel")  # of the names of models' classes
INNER_ENDINGS = ("TextModel", "Model", "Decoder")  # of their decoders'


@dataclass(frozen=True, eq=False)
class Decoder:
    """module: the decoder, which holds the layers, the embedding of token ids and the last norm. rotary, positions: the
    rotary embedding, and the learned one of positions; None for a model without one. embedding_multiplier,
    logit_divisor: by what embeddings are multiplied and logits divided. logit_cap: the softcap of logits, 0 for none.
    """

    module: Any
    form: DecoderForm
    head: Any
    layers: Any
    embedding: Any
    norm: Any
    rotary: Any
    positions: Positions | None
    embedding_multiplier: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float = 0.0


@dataclass(frozen=True, eq=False)
class Positions:
    """Learned embeddings, of which position p is row p + offset. of_mask: as in DecoderForm."""

    table: nn.Embedding
    offset: int = 0
    of_mask: bool = False

    def __call__(self, positions: Tensor, drafts: bool) -> Tensor:
        """Embeddings [..., K] of positions[...]; any of draft tokens beyond the last one, which are never kept."""
        rows = positions + self.offset if self.offset else positions
        rows = rows.clamp(max=self.table.num_embeddings - 1) if drafts else rows
        return nn.functional.embedding(rows, self.table.weight)


def decoder_of(model: Any) -> Decoder:
    """The decoder of a patched causal language model that calls its layers one after the other. Raises CannotFuse."""
    decoder = found_in(model)
    if decoder.rotary is not None and (reason := rotary_why_not(decoder.rotary)):
        raise CannotFuse(reason)
    return decoder


def found_in(model: Any) -> Decoder:
    """The same of a model that may not be patched yet, whatever its rotary embedding is. Raises CannotFuse."""
    family, form = form_in(model)
    if family is not None and family.unfused is not None:
        raise CannotFuse(family.unfused)
    module, head = child_of(model, form.path), getattr(model, "lm_head", None)
    if module is None or head is None or not getattr(module, form.layers, None):
        raise CannotFuse("it has no Llama-like decoder")
    names = (form.layers, form.embedding, form.norm, "rotary_emb")
    layers, embedding, norm, rotary = (getattr(module, name, None) for name in names)
    table = None if form.positions is None else Positions(getattr(module, form.positions), form.offset, form.of_mask)
    constants = () if family is None else _constants(family, form, model)
    decoder = Decoder(module, form, head, layers, embedding, norm, rotary, table, *constants)
    if reason := why_not(model, decoder):
        raise CannotFuse(reason)
    return decoder


def why_not(model: Any, decoder: Decoder) -> str | None:
    """Why a model, or the decoder in it, may not simply call its layers one after the other; None where they do."""
    table = None if decoder.positions is None else decoder.positions.table
    parts = (decoder.embedding, decoder.norm, decoder.rotary, decoder.head, table)
    reasons = (own_code.why_not_in(one.modules()) for one in parts if isinstance(one, nn.Module))
    form = decoder.form
    names = form.path.split(".")
    around = [child_of(model, ".".join(names[:count])) for count in range(1, len(names))]
    whole = (model, *around, decoder.module, decoder.layers)
    if reason := own_code.why_not_in(whole) or next(filter(None, reasons), None):
        return reason
    known = {form.layers, form.embedding, form.norm, form.positions}
    for name, child in decoder.module.named_children():
        if name not in known and any(True for _ in child.parameters()):
            return f"its decoder's {name} is not known to fused layers"
    if not isinstance(decoder.norm, nn.Module):
        return "its decoder has no last norm"
    if decoder.positions is not None and "weight" not in decoder.positions.table._parameters:
        return f"its decoder's {form.positions} was replaced"
    count = decoder.module.config.num_hidden_layers
    attentions = (LayerDescription(layer).attention for layer in decoder.layers)
    places = [None if one is None else getattr(one.module, "layer_idx", None) for one in attentions]
    return None if places == list(range(count)) else f"its layers have the indices {places}, of {count}"


def _constants(family: Family, form: DecoderForm, model: Any) -> tuple[float, float, float]:
    """(embedding_multiplier, logit_divisor, logit_cap) of a model of a family."""
    config, name = model.config, family.embedding_multiplier
    multiplier = 1.0 if name is None else float(getattr(child_of(model, form.path), name))
    if is_multimodal(model):  # its own forward calls the head
        return multiplier, 1.0, logit_cap(model)
    divisor = 1.0 if family.logit_divisor is None else float(getattr(config, family.logit_divisor))
    if family.logit_multiplier is not None:
        divisor = 1.0 / float(getattr(config, family.logit_multiplier))
    cap = getattr(config, "final_logit_softcapping", None) if family.capped_logits else None
    return multiplier, divisor, float(cap or 0.0)


def form_in(model: Any) -> tuple[Family | None, DecoderForm]:
    """(family, where the decoder lies) of a causal language model, or of the one in a multimodal model."""
    family, path = family_by(model, ENDINGS), None
    if family is None and (found := language_model(model)) is not None:
        path, module = found
        family = family_by(module, INNER_ENDINGS)
    form = DecoderForm() if family is None else family.decoder
    return family, form if path is None else replace(form, path=path)


def family_by(module: Any, endings: tuple[str, ...]) -> Family | None:
    """The family of a module whose class has one of these endings; the first that fits."""
    return next((found for end in endings if (found := family_of_class(module, end)) is not None), None)


def module_in(model: Any) -> Any:
    """The decoder's module in a model."""
    return model.get_decoder() if is_multimodal(model) else child_of(model, form_in(model)[1].path)


def layers_in(model: Any) -> Any:
    """The decoder layers' modules of a causal language model; () where it has none that are known."""
    form = form_in(model)[1]
    return getattr(child_of(model, form.path), form.layers, ())


def layers_of(module: Any) -> Any:
    """The layers' modules of a decoder."""
    family = family_by(module, INNER_ENDINGS)
    return getattr(module, "layers" if family is None else family.decoder.layers)
