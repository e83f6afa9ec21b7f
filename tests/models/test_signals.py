"""What encoders are calibrated on: batches, pictures, sound, text, and noise."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import transformers as t

import accelpatch
from accelpatch.errors import LoadError
from accelpatch.models import signals
from tests.fusion.test_encoders import inputs_of, model_of, run


def pictures() -> list[Any]:
    image = pytest.importorskip("PIL.Image")
    return [image.fromarray(numpy.full((40, 50, 3), 40 * at, dtype=numpy.uint8)) for at in range(3)]


def waves() -> list[Any]:
    return [numpy.sin(numpy.arange(1600) / (3 + at)).astype(numpy.float32) for at in range(2)]


def vit_processor() -> Any:
    return t.ViTImageProcessor(size={"height": 32, "width": 32})


GIVEN: dict[str, Any] = {
    "vit-pictures": ("vit", pictures, vit_processor),
    "vit-batches": ("vit", lambda: [inputs_of("vit"), inputs_of("vit")], lambda: None),
    "vit-noise": ("vit", lambda: None, lambda: None),
    "wav2vec2-sound": ("wav2vec2", waves, t.Wav2Vec2FeatureExtractor),
    "wav2vec2-noise": ("wav2vec2", lambda: None, lambda: None),
    "bert-batches": ("bert", lambda: [inputs_of("bert")], lambda: None),
    "bert-noise": ("bert", lambda: None, lambda: None),
    "roberta-noise": ("roberta", lambda: None, lambda: None),
}


@pytest.mark.parametrize("case", GIVEN)
def test_static_scales_come_of_the_data(case: str) -> None:
    kind, data, processor = GIVEN[case]
    model, inputs = model_of(kind), inputs_of(kind)
    due = run(model, inputs)[0]
    accelpatch.patch(model, "smoothquant-static", data=data(), tokenizer=processor())
    report: Any = model.accelpatch.report()  # type: ignore[union-attr]
    assert any("static" in str(site.kernel) for site in report.sites)
    assert any("noise in the shapes" in note for note in report.notes) == case.endswith("noise")
    found = run(model, inputs)[0]
    kept = inputs.get("attention_mask", torch.ones(found.shape[:2])).bool()
    assert torch.nn.functional.cosine_similarity(found[kept], due[kept], dim=-1).min() >= 0.99


def test_larger_pictures_give_larger_scales() -> None:
    """The scales are those of the data, and not of what the configuration gives."""
    model = model_of("vit")
    small, large = ([{"pixel_values": scale * inputs_of("vit")["pixel_values"]}] for scale in (0.1, 10.0))
    found = [accelpatch.calibrate(model, data).sites for data in (small, large)]
    assert found[0].keys() == found[1].keys()
    assert any(not torch.equal(found[0][path].absmax, found[1][path].absmax) for path in found[0])


def test_what_no_processor_takes_is_an_error() -> None:
    with pytest.raises(LoadError, match="takes no"):
        accelpatch.calibrate(model_of("vit"), [object()], tokenizer=vit_processor())


def test_text_is_left_to_texts() -> None:
    assert signals.batches(model_of("bert"), ["some text"], None, None) is None
