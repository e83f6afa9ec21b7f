"""Models whose inputs are not token ids alone: inputs are made for them, or nothing is verified and that is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import accelpatch
from accelpatch.errors import PatchError, PlanError, VerifyError
from accelpatch.models.inputs import sample_inputs
from accelpatch.recipe.recipe import parse
from tests.support.tiny import CAUSAL, snapshot

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_TEXT = _SIZES | {"vocab_size": 160, "max_position_embeddings": 20, "eos_token_id": 2}
_PICTURE = _SIZES | {"image_size": 16, "patch_size": 4}
_PAIR = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 160,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_WAVE = {"conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (8, 4), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 32}  # fmt: skip
_DECODER = _SIZES | {"vocab_size": 160, "is_decoder": True, "add_cross_attention": True}


def whisper() -> Any:
    config = hf.WhisperConfig(**_PAIR, num_mel_bins=16, max_source_positions=20)
    return hf.WhisperForConditionalGeneration(config)


def pictures_to_text() -> Any:
    parts = hf.ViTConfig(**_PICTURE), hf.BertConfig(**_DECODER)
    return hf.VisionEncoderDecoderModel(hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts))


# model -> the names of the inputs that it is run on
MODELS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "whisper": (whisper, {"input_features", "decoder_input_ids"}),
    "whisper-encoder": (lambda: whisper().model.encoder, {"input_features", "decoder_input_ids"}),
    "clip": (
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=_TEXT, vision_config=_PICTURE, projection_dim=32)),
        {"input_ids", "attention_mask", "pixel_values", "use_cache"},
    ),
    "clip-text": (lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**_TEXT)), {"input_ids", "attention_mask", "use_cache"}),
    "clip-vision": (lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**_PICTURE)), {"pixel_values"}),
    "wav2vec2": (lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_SIZES, **_WAVE)), {"input_values"}),
    "spectrogram": (
        lambda: hf.ASTForAudioClassification(
            hf.ASTConfig(**_SIZES, max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8)
        ),
        {"input_values"},
    ),
    "speech2text": (
        lambda: hf.Speech2TextForConditionalGeneration(
            hf.Speech2TextConfig(**_PAIR, input_feat_per_channel=16, conv_channels=32, max_source_positions=60)
        ),
        {"input_features", "decoder_input_ids"},
    ),
    "video": (
        lambda: hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**_PICTURE, num_frames=4)), {"pixel_values"}
    ),
    "trocr": (pictures_to_text, {"pixel_values", "decoder_input_ids"}),
    "swin": (
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=(1, 1), num_heads=(2, 2), window_size=4)
        ),
        {"pixel_values"},
    ),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_PAIR)), set()),
    "xlnet": (
        lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=160, d_model=64, n_layer=2, n_head=4, d_inner=96)), set()
    ),
}  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_verified_on_inputs_made_for_it(name: str, recipe: str) -> None:
    model, names = build(name), MODELS[name][1]
    before = snapshot(model)
    given: list[set[str]] = []
    handle = model.register_forward_pre_hook(lambda m, args, kwargs: given.append(set(kwargs)), with_kwargs=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelpatch.patch(model, recipe)
    handle.remove()
    assert [str(one.message) for one in said if "verified" in str(one.message)] == []
    report = model.accelpatch.report()
    assert report.verification is not None
    assert report.verification.failures == []
    replaced = [site for site in report.sites if site.replacer]
    assert len(replaced) >= 4
    assert sum(site.format_error is not None for site in replaced) > 0.6 * len(replaced)
    assert not names or given[-1] == names
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def series() -> Any:
    """Past values, masks, time features: nothing that is made here."""
    config = hf.TimeSeriesTransformerConfig(prediction_length=4, d_model=64)
    return hf.TimeSeriesTransformerModel(config).eval()


class Refuses(torch.nn.Module):
    """A model that takes ids and fails on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.LlamaConfig(vocab_size=10)
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("call encode() instead")


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "series": (series, "none can be made from its configuration"),
    "refuses": (lambda: Refuses().eval(), "it refuses those made for it .NotImplementedError: call encode"),
    "no-configuration": (lambda: torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), "none can be made"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_verified_and_that_is_said(name: str) -> None:
    make, reason = UNKNOWN[name]
    model = make()
    before = snapshot(model)
    with pytest.warns(UserWarning, match=f"nothing is verified, no inputs for {type(model).__name__}: {reason}"):
        accelpatch.patch(model, "int8")
    report = model.accelpatch.report()
    assert report.verification is None
    assert report.replaced > 0
    assert all("no inputs for" in site.unverified for site in report.sites if site.replacer)
    assert any("nothing is verified" in note for note in report.notes)
    assert "nothing is verified" in str(report)
    accelpatch.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_recipe_whose_failures_are_errors_refuses(name: str) -> None:
    model = UNKNOWN[name][0]()
    before = snapshot(model)
    recipe = parse("name: strict\nextends: int8\nverify: {on_failure: error}\n")
    with pytest.raises(VerifyError, match=r"nothing was changed\. Give some: .*inputs="):
        accelpatch.patch(model, recipe)
    assert snapshot(model) == before


def test_inputs_that_the_user_gives_are_all_that_is_tried() -> None:
    model = build("whisper")
    sample = {"input_features": torch.randn(1, 16, 40), "decoder_input_ids": torch.tensor([[1, 5]])}
    accelpatch.patch(model, "int8", inputs=[sample])
    assert model.accelpatch.report().verification.tokens == 2
    accelpatch.unpatch(model)
    with pytest.raises(ValueError, match="mel input features"):
        accelpatch.patch(model, "int8", inputs=[{"input_features": torch.randn(1, 16, 7)}])


def test_a_model_with_nothing_to_replace_is_an_error_of_the_plan() -> None:
    model = hf.EncodecModel(hf.EncodecConfig(num_filters=8, hidden_size=32, codebook_dim=32, codebook_size=64)).eval()
    with pytest.raises(PlanError, match="matches no module"):
        accelpatch.patch(model, "int8")


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("full"), MemoryError()], ids=["device", "host"])
def test_memory_that_runs_out_is_no_reason_to_skip_verification(fault: BaseException) -> None:
    model = CAUSAL["llama"].make()

    def full(*args: Any) -> None:
        raise fault

    model.model.layers[0].register_forward_pre_hook(full)
    with pytest.raises(PatchError, match="out of memory while it ran on the sample inputs"):
        accelpatch.patch(model, "int8")


ODD: list[Any] = [None, 0, -1, "many", (3, 4), [2], 1.5, {"height": 8, "width": 4}, {"shortest_edge": 8}]


@pytest.mark.parametrize("value", ODD, ids=str)
def test_odd_configurations(value: Any) -> None:
    """Whatever stands there, no error comes out of making inputs and the plan."""
    model = build("clip")
    for part in (model.config.text_config, model.config.vision_config):
        for name in ("vocab_size", "max_position_embeddings", "image_size", "num_channels", "num_hidden_layers"):
            object.__setattr__(part, name, value)
    assert isinstance(sample_inputs(model), list)
    accelpatch.plan(model, "int8")
