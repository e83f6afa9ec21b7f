"""The model that drafts tokens for another one: the option ``--draft`` of ``run`` and ``bench``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelpatch.errors import AccelpatchError

from . import options

if TYPE_CHECKING:
    from accelpatch.report import Report

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="MODEL",
        help="Smaller model of the same vocabulary that drafts tokens, patched with the same recipe; greedy answers "
        "stay the same.",
    ),
]  # fmt: skip


def check(name: str | None, conflicting: Mapping[str, Any]) -> None:
    """Raise LoadError for a draft model that cannot be found, and BadParameter if a conflicting option is given too.

    conflicting: name -> value of options that cannot be combined with --draft.
    """
    if name is None:
        return
    for option, given in conflicting.items():
        if given:
            raise typer.BadParameter(f"goes without {option}", param_hint="--draft")
    options.check_name(name)


def opened(name: str | None, network: Any, dtype: str, device: str, patch: Mapping[str, Any]) -> Any:
    """The draft model for `network`, patched; None if `name` is None. Raises AccelpatchError for another vocabulary.

    patch: the recipe and the verification, as `options.open_patched` takes them.
    """
    if name is None:
        return None
    from accelpatch import api

    recipe = None if api.is_patched(name) else patch["recipe"]
    given: Any = {"recipe": recipe, "verify": patch["verify"], "statistics": None}
    found = options.open_patched(name, dtype=dtype, device=device, **given).model
    check_vocabulary(name, found, network)
    return found


def check_vocabulary(name: str, found: Any, network: Any) -> None:
    """Raise AccelpatchError if the vocabularies of the draft model (`found`) and of `network` differ in size."""
    sizes = [one.config.get_text_config(decoder=True).vocab_size for one in (found, network)]
    if sizes[0] != sizes[1]:
        raise AccelpatchError(
            f"--draft {name} has a vocabulary of {sizes[0]} tokens, and the model one of {sizes[1]}: give a model of "
            "the same family and tokenizer"
        )


def facts(report: Report) -> list[tuple[str, str]]:
    """The summary's row about drafts: how many were accepted, or why transformers' own loop ran; none without drafts."""
    from accelpatch.report import DRAFT_CHECKS, DRAFTED, DRAFTS_ACCEPTED, NO_DRAFTS

    paths = report.paths
    reasons = [path.removeprefix(NO_DRAFTS) for path in paths if path.startswith(NO_DRAFTS)]
    if reasons:
        return [("drafts", f"by transformers' own loop: {reasons[0]}")]
    if not paths.get(DRAFT_CHECKS):
        return []
    return [
        (
            "drafts",
            f"{paths[DRAFTS_ACCEPTED]} of {paths[DRAFTED]} draft tokens accepted, in {paths[DRAFT_CHECKS]} checks",
        )
    ]
