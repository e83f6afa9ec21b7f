"""Finds the vision and audio towers of a multimodal model, for rules (as roles) and for the plan's notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from accelpatch.patching.site import Site
from accelpatch.report import human

VISION, AUDIO = "vision", "audio"  # additional roles of every site in such a tower or its projector
SOUNDS = ("audio", "speech")  # parts of the names of modules in an audio tower


def tower_of(model: Any, path: str, language: Sequence[str]) -> str:
    """VISION or AUDIO for the path of a module in a tower, else "". language: see `language_paths`."""
    if not language or any(path == one or path.startswith(f"{one}.") for one in language):
        return ""
    config, named = model.config, any(word in path for word in SOUNDS)
    if getattr(config, "vision_config", None) is None:
        return AUDIO
    return AUDIO if named and getattr(config, "audio_config", None) is not None else VISION


def tower_lookup(model: Any) -> Callable[[str], str]:
    """`tower_of` as a function of the path alone."""
    language = language_paths(model)
    return lambda path: tower_of(model, path, language)


def language_paths(model: Any) -> list[str]:
    """Paths of the language model and the head in a multimodal model that generates; empty for any other model."""
    config = getattr(model, "config", None)
    towers = [getattr(config, name, None) for name in ("vision_config", "audio_config")]
    if not any(one is not None for one in towers) or getattr(config, "is_encoder_decoder", False):
        return []
    if not getattr(model, "can_generate", bool)():
        return []
    parts = (model.get_decoder(), model.get_output_embeddings())
    found = [next((path for path, one in model.named_modules() if one is part), "") for part in parts]
    return [] if "" in found else found


def part_notes(model: nn.Module, found: Sequence[Site]) -> list[str]:
    """Notes about the language model, the vision towers and the audio towers; none for other models."""
    if not (language := language_paths(model)):
        return []
    lines = [f"language model: {language[0]}, in every step"]
    for part in (VISION, AUDIO):
        sites = [site for site in found if site.tower == part]
        depth = language[0].count(".") + 1
        names = dict.fromkeys(".".join(site.path.split(".")[:depth]) for site in sites)
        if sites:
            lines.append(f"{part}: {', '.join(names)} ({human(sum(site.bytes for site in sites))}), in prompts alone")
    return lines
