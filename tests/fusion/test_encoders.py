"""Fused layers of encoders: every family against stock, and what makes a layer run its modules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import accelpatch
from accelpatch.fusion import verified
from accelpatch.fusion.encoder_layer import FusedEncoder
from accelpatch.fusion.verified_encoders import encoder_layers
from accelpatch.models.encoders import FORMS, encoder_form_of

LAYERS = 3
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
MLP = {"intermediate_size": 128}
WORDS = {"vocab_size": 99}
SOUND = {
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
PICTURES = {"image_size": 32, "patch_size": 8}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _text(length: int = 12) -> dict[str, Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return {"input_ids": torch.randint(3, 90, (2, length)), "attention_mask": mask}


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 1200)}


Inputs = Callable[[], dict[str, Tensor]]
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
#: id -> class, configuration, inputs
FAMILIES: Mapping[str, tuple[Any, Any, Inputs]] = {
    "bert": (t.BertModel, t.BertConfig(**WORDS, **SIZES, **MLP), _text),
    "roberta": (t.RobertaModel, t.RobertaConfig(**WORDS, **SIZES, **MLP), _text),
    "xlm-roberta": (t.XLMRobertaModel, t.XLMRobertaConfig(**WORDS, **SIZES, **MLP), _text),
    "camembert": (t.CamembertModel, t.CamembertConfig(**WORDS, **SIZES, **MLP), _text),
    "electra": (t.ElectraModel, t.ElectraConfig(**WORDS, **SIZES, **MLP, embedding_size=64), _text),
    "mpnet": (t.MPNetModel, t.MPNetConfig(**WORDS, **SIZES, **MLP), _text),
    "distilbert": (
        t.DistilBertModel, t.DistilBertConfig(**WORDS, dim=64, n_heads=4, n_layers=LAYERS, hidden_dim=128), _text,
    ),
    "modernbert": (
        t.ModernBertModel,
        t.ModernBertConfig(**WORDS, **SIZES, **MLP, **ENDS, cls_token_id=1, sep_token_id=2, local_attention=4), _text,
    ),
    "vit": (t.ViTModel, t.ViTConfig(**SIZES, **MLP, **PICTURES), _pictures),
    "dinov2": (t.Dinov2Model, t.Dinov2Config(**SIZES, **PICTURES), _pictures),
    "clip": (t.CLIPVisionModel, t.CLIPVisionConfig(**SIZES, **MLP, **PICTURES), _pictures),
    "clip-text": (t.CLIPTextModel, t.CLIPTextConfig(**WORDS, **SIZES, **MLP, **ENDS), _text),
    "siglip": (t.SiglipVisionModel, t.SiglipVisionConfig(**SIZES, **MLP, **PICTURES), _pictures),
    "wav2vec2": (t.Wav2Vec2Model, t.Wav2Vec2Config(**SIZES, **MLP, **SOUND), _sound),
    "wav2vec2-stable": (t.Wav2Vec2Model, t.Wav2Vec2Config(**SIZES, **MLP, **SOUND, **STABLE), _sound),
    "hubert": (t.HubertModel, t.HubertConfig(**SIZES, **MLP, **SOUND), _sound),
}  # fmt: skip


def model_of(kind: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    cls, config, _ = FAMILIES[kind]
    config = copy.deepcopy(config)
    for name, value in sizes.items():
        setattr(config, name, value)
    model: nn.Module = cls(config).eval()
    for name, parameter in model.named_parameters():  # biases and scales that do something
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("weight" in name), std=0.1)
    return model


def inputs_of(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return FAMILIES[kind][2]()


def patched(kind: str, recipe: str = "exact") -> Any:
    model = model_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelpatch.patch(model, recipe)
    return model


def run(model: Any, inputs: Mapping[str, Any], **more: Any) -> Any:
    with torch.no_grad():
        return model(**inputs, **more)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Context manager: counts calls that run fused."""
    found, own = [0], FusedEncoder.__call__

    def count(self: FusedEncoder, *args: Any) -> Tensor:
        found[0] += 1
        return own(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedEncoder, "__call__", count)
        yield found


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-5 * other.abs().max())


def test_every_class_of_the_table_has_a_model_here() -> None:
    here = {type(module).__name__ for kind in FAMILIES for module in model_of(kind).modules()}
    absent = FORMS.keys() - here
    assert absent <= {"HubertEncoderLayerStableLayerNorm"}  # a copy of Wav2Vec2's


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_as_stock(kind: str, attention: str) -> None:
    model, inputs = model_of(kind), inputs_of(kind)
    if attention == "eager" and kind != "mpnet":
        model.set_attn_implementation("eager")  # type: ignore[operator]
    due = run(model, inputs)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    accelpatch.patch(model, "exact")
    report: Any = model.accelpatch.report()  # type: ignore[union-attr]
    assert f"{LAYERS} of {LAYERS} layers fused" in str(report)
    assert report.verification.fused_layers == LAYERS
    with counted() as calls:
        found = run(model, inputs)
    assert calls == [LAYERS]
    kept = inputs.get("attention_mask", torch.ones(found[0].shape[:2])).bool()
    assert close(found[0][kept], due[0][kept])
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    accelpatch.unpatch(model)
    assert torch.equal(run(model, inputs)[0], due[0])
    assert not encoder_layers(model)


@pytest.mark.parametrize("kind", ["bert", "vit", "modernbert", "wav2vec2", "clip-text", "distilbert"])
def test_hidden_states_and_attentions_as_stock(kind: str) -> None:
    model, inputs = model_of(kind), inputs_of(kind)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    asked = {"output_hidden_states": True, "output_attentions": True}
    due = run(model, inputs, **asked)
    accelpatch.patch(model, "exact")
    found = run(model, inputs, **asked)
    assert len(found.hidden_states) == len(due.hidden_states) == LAYERS + 1
    assert len(found.attentions) == len(due.attentions) == LAYERS
    for name in ("hidden_states", "attentions"):
        assert all(close(one, other) for one, other in zip(found[name], due[name], strict=True))


def test_a_copy_runs_fused_too() -> None:
    model, inputs = patched("bert"), inputs_of("bert")
    twin = copy.deepcopy(model)
    with counted() as calls:
        assert close(run(twin, inputs)[0], run(model, inputs)[0])
    assert calls == [2 * LAYERS]


def test_a_layer_over_its_bound_runs_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    due, own = run(model_of("bert"), inputs_of("bert")), FusedEncoder.__call__

    def wrong(self: FusedEncoder, x: Tensor, attend: Any) -> Tensor:
        return own(self, x, attend) * 1.01

    monkeypatch.setattr(FusedEncoder, "__call__", wrong)
    model = patched("bert")
    assert f"0 of {LAYERS} layers fused" in str(model.accelpatch.report())
    assert all("from its modules" in one for one in model.accelpatch.report().verification.failures)
    assert not any(layer.is_fused for layer in encoder_layers(model).values())
    assert close(run(model, inputs_of("bert"))[0], due[0])


def test_a_weight_that_cannot_be_concatenated_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("vit")
    first = next(one for one in model.modules() if encoder_form_of(one) is not None)
    first.attention.k_proj.bias = None  # type: ignore[union-attr]
    accelpatch.patch(model, "exact")
    text = str(model.accelpatch.report())  # type: ignore[union-attr]
    assert f"{LAYERS - 1} of {LAYERS} layers fused" in text
    assert "only some have a bias" in text


@pytest.mark.parametrize("recipe", ["int8", "smoothquant"])
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_packed_weights_of_a_cpu_run_as_modules(kind: str, recipe: str) -> None:
    model = patched(kind, recipe)
    assert f"0 of {LAYERS} layers fused" in str(model.accelpatch.report())
    with counted() as calls:
        run(model, inputs_of(kind))
    assert calls == [0]


def test_errors_of_verification_are_in_the_report() -> None:
    report = patched("bert").accelpatch.report()
    layers = [one for one in report.sites if one.replacer == "fused_layer"]
    assert all(one.steps and one.kernel_bound >= verified.bound_of(nn.Linear(1, 1), torch.float32)
               for one in layers)  # fmt: skip
