"""Saved patched models to load, damage and distrust; float ones to quantise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import accelpatch  # noqa: F401  from_pretrained loads saved patched models from here on
from tests.support.checkpoints import saved
from tests.support.one_thread import _one_thread  # noqa: F401
from tests.support.packed import plain


@pytest.fixture
def model() -> Any:
    """A tiny Llama with tied embeddings, not patched."""
    return plain("llama")


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    """Its folder."""
    plain("llama").save_pretrained(tmp_path / "floats")
    return tmp_path / "floats"


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """The folder of the model, patched by int4 (tied head and embedding in int8)."""
    saved(model, "int4", tmp_path / "patched")
    return tmp_path / "patched"
