"""Tiny random models on disk with a byte-level tokenizer; commands run in this process, or as a user runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from accelpatch.cli import app
from tests.support import warm_python
from tests.support.one_thread import _one_thread  # noqa: F401

ROOT = Path(__file__).parent.parent.parent
CONTEXT = 256
Cli = Callable[..., Result]
Shell = Callable[..., subprocess.CompletedProcess[str]]


def byte_tokenizer(most: int = 256) -> PreTrainedTokenizerFast:
    """One token a byte, for the first `most` bytes, after three special ones; with a chat template."""
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:most]]
    inner = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return tokenizer


def save_model(folder: Path, *, context: int = CONTEXT, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """A seeded random Llama of 2 layers, untied head, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=1, eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=byte_tokenizer()))


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a tokenizer."""
    return str(save_model(tmp_path_factory.mktemp("models") / "bare"))


@pytest.fixture(scope="session")
def no_template_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return str(save_model(tmp_path_factory.mktemp("models") / "plain", tokenizer=tokenizer))


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A context so long that an answer does not end while a test looks at it."""
    folder = tmp_path_factory.mktemp("models") / "endless"
    return str(save_model(folder, context=1 << 20, tokenizer=byte_tokenizer()))


@pytest.fixture(autouse=True)
def _no_variable_left_behind() -> Iterator[None]:
    """Commands set variables for the libraries that they load."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for one test; the others share the user's, where the native kernels are built already."""
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def cli() -> Cli:
    """Run a command in this process; an exception that is not turned into a status fails the test."""

    def invoke(*arguments: str, **options: Any) -> Result:
        result = CliRunner().invoke(app, list(arguments), **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run ``accelpatch`` as a user does: its output piped, in an empty folder."""

    def execute(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "timeout": 120} | options
        return warm_python.run(["-m", "accelpatch", *arguments], **options)

    return execute


def environment() -> dict[str, str]:
    """This process's, with this checkout importable from any folder."""
    return dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
