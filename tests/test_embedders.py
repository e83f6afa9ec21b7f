"""Encoders as their users call them: sentence-transformers, pipelines, the trainer's evaluation, and scripts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers as t

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME, WITHOUT_PADDING
from tests.support import warm_python

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "on", "mat", "ran", "far",
         "away", "over", "big", "small", "house", "tree", "and", "it", "was"]  # fmt: skip
SENTENCES = ["the cat sat on the mat", "a dog ran", "it was a big house and the small tree was far away", "", "cat"]
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
NAMES = ("contradiction", "entailment")
LABELS: dict[str, Any] = {"id2label": dict(enumerate(NAMES)), "label2id": {name: at for at, name in enumerate(NAMES)}}


def tokenizer(folder: Path) -> Any:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return t.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"))


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """A folder with a BERT and its tokenizer."""
    folder = tmp_path / "embedder"
    folder.mkdir()
    torch.manual_seed(0)
    t.BertModel(t.BertConfig(vocab_size=len(WORDS), **SIZES)).save_pretrained(folder)
    tokenizer(folder).save_pretrained(folder)
    return folder


@pytest.fixture
def reranker(tmp_path: Path) -> Path:
    """A folder with a classifier of one label and its tokenizer."""
    folder = tmp_path / "reranker"
    folder.mkdir()
    torch.manual_seed(0)
    config = t.BertConfig(vocab_size=len(WORDS), num_labels=1, **SIZES)
    t.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer(folder).save_pretrained(folder)
    return folder


def paths(model: Any) -> Any:
    return vars(model)[RUNTIME].paths


def test_sentence_transformers(embedder: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(embedder), device="cpu")
    due = model.encode(SENTENCES, convert_to_tensor=True)
    assert accelpatch.patch(model, "exact") is model
    assert "2 of 2 layers fused" in str(model.accelpatch.report())
    assert model.accelpatch.report().verification.fused_layers == 2
    inner = next(one for one in model.modules() if isinstance(one, t.PreTrainedModel))
    before = paths(inner)[WITHOUT_PADDING]
    found = model.encode(SENTENCES, convert_to_tensor=True)
    assert paths(inner)[WITHOUT_PADDING] > before
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-6)
    accelpatch.unpatch(model)
    assert not hasattr(model, "accelpatch")
    assert torch.equal(model.encode(SENTENCES, convert_to_tensor=True), due)


@pytest.mark.parametrize("recipe", ["int8", "smoothquant"])
def test_quantised_embeddings_are_near(embedder: Path, recipe: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(embedder), device="cpu")
    due = model.encode(SENTENCES, convert_to_tensor=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelpatch.patch(model, recipe)
    found = model.encode(SENTENCES, convert_to_tensor=True)
    least = torch.nn.functional.cosine_similarity(found, due).min()
    assert (0.99 if recipe == "smoothquant" else 0.999) <= least < 1


def test_cross_encoders(reranker: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.CrossEncoder(str(reranker), device="cpu")
    pairs = [(SENTENCES[0], other) for other in SENTENCES if other]
    due = model.predict(pairs)
    accelpatch.patch(model, "exact")
    numpy.testing.assert_allclose(model.predict(pairs), due, rtol=1e-4, atol=1e-6)
    assert len(model.rank("a cat", SENTENCES[:3])) == 3
    accelpatch.unpatch(model)
    assert (model.predict(pairs) == due).all()


def test_a_script_that_embeds(embedder: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    script = tmp_path / "embed.py"
    script.write_text(
        "import sys\nfrom sentence_transformers import SentenceTransformer\n"
        "model = SentenceTransformer(sys.argv[1], device='cpu')\n"
        "print('mean', round(float(model.encode(['the cat sat', 'a dog ran far away']).mean()), 5))\n"
    )
    own, by_exec = (
        warm_python.run([*before, str(script), str(embedder)])
        for before in ([], ["-m", "accelpatch", "exec", "--recipe", "exact"])
    )
    assert own.stdout.splitlines()[-1] == next(line for line in by_exec.stdout.splitlines() if line.startswith("mean"))
    assert "patched with exact" in by_exec.stdout + by_exec.stderr


def _text(task: str) -> Callable[[Path], tuple[Any, Any, dict[str, Any]]]:
    def make(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
        config = t.BertConfig(vocab_size=len(WORDS), **SIZES, **LABELS)
        cls: Any = t.BertModel if task == "feature-extraction" else t.BertForSequenceClassification
        more = {"candidate_labels": ["cat", "tree"]} if task == "zero-shot-classification" else {}
        made = t.pipeline(task, model=cls(config).eval(), tokenizer=tokenizer(folder), device="cpu")
        return made, SENTENCES[:3], more

    return make


def _pictures(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    model = t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SIZES))
    processor = t.ViTImageProcessor(size={"height": 32, "width": 32})
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(numpy.full((40, 50, 3), 40 * at, dtype=numpy.uint8)) for at in range(3)]
    return t.pipeline("image-classification", model=model.eval(), image_processor=processor, device="cpu"), pictures, {}


def _sound(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    config = t.Wav2Vec2Config(
        **SIZES, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_labels=3, classifier_proj_size=16,
    )  # fmt: skip
    model = t.Wav2Vec2ForSequenceClassification(config)
    extractor = t.Wav2Vec2FeatureExtractor()
    waves = [numpy.sin(numpy.arange(1600) / (3 + at)).astype(numpy.float32) for at in range(2)]
    return t.pipeline("audio-classification", model=model.eval(), feature_extractor=extractor, device="cpu"), waves, {}


PIPELINES: dict[str, Callable[[Path], tuple[Any, Any, dict[str, Any]]]] = {
    "feature-extraction": _text("feature-extraction"),
    "text-classification": _text("text-classification"),
    "zero-shot-classification": _text("zero-shot-classification"),
    "image-classification": _pictures,
    "audio-classification": _sound,
}


def scores(made: Any) -> list[float]:
    """All numbers in a pipeline's answer, in order."""
    if isinstance(made, dict):
        return [number for _, one in sorted(made.items()) for number in scores(one)]
    if isinstance(made, (list, tuple)):
        return [number for one in made for number in scores(one)]
    return [float(made)] if isinstance(made, (float, int)) else []


@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines(task: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe, given, more = PIPELINES[task](tmp_path)
    due = pipe(given, **more)
    accelpatch.patch(pipe.model, "exact")
    assert "2 of 2 layers fused" in str(pipe.model.accelpatch.report())
    found = pipe(given, **more)
    numpy.testing.assert_allclose(scores(found), scores(due), rtol=1e-4, atol=1e-5)
    assert len(scores(due)) >= 3


def test_the_trainers_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = t.BertForSequenceClassification(t.BertConfig(vocab_size=len(WORDS), **SIZES, **LABELS)).eval()
    made = tokenizer(tmp_path)(SENTENCES[:3], padding=True, return_tensors="pt")
    rows = [{name: one[at] for name, one in made.items()} | {"labels": torch.tensor(at % 2)} for at in range(3)]

    def loss() -> float:
        settings = t.TrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True, per_device_eval_batch_size=3)
        return float(t.Trainer(model, settings, eval_dataset=rows).evaluate()["eval_loss"])  # type: ignore[arg-type]

    due = loss()
    accelpatch.patch(model, "exact")
    before = paths(model)[WITHOUT_PADDING]
    assert abs(loss() - due) < 1e-5
    assert paths(model)[WITHOUT_PADDING] == before + 1
