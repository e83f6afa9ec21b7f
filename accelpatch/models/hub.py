"""Models on the Hugging Face hub: a complete local copy, else a download, which fails soon without a network."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from accelpatch.errors import LoadError
from accelpatch.models import checkpoint

ELSEWHERE = "Give the path of a folder with config.json and safetensors instead of the name, or of a .gguf file"
REACH_SECONDS = 10.0  # one try, where the hub's client would try for minutes
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
# The HTTP client's own error, whichever client the installed version uses, and OSError.
_NETWORK_ERRORS: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)


def snapshot(name: str) -> Path:
    """The folder with the model's config, tokenizer and safetensors files.

    Raises LoadError where the local copy is incomplete and the hub cannot be reached, has no such model or wants a
    token.
    """
    if found := complete(name):
        return found
    try:
        folder = Path(snapshot_download(name, allow_patterns=_SMALL_FILES))
        shards = checkpoint.shard_names(folder) or ["model.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=shards))
    except GatedRepoError as error:
        raise LoadError(f"{name} is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise LoadError(
            f"the hub has no model called {name!r}, or it is private: log in with `hf auth login`"
        ) from error
    except _NETWORK_ERRORS as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise LoadError(f"{_tried(name)}, and its download failed: {why}. {ELSEWHERE}") from error
    return folder


def complete(name: str) -> Path | None:
    """`local`; None where the hub can be asked instead. Raises LoadError where it cannot be reached."""
    if found := local(name):
        return found
    if constants.HF_HUB_OFFLINE:
        raise LoadError(f"{_tried(name)} and not asked for on the hub (HF_HUB_OFFLINE is set). {ELSEWHERE}")
    _reach(name)
    return None


def local(name: str, *, weights: bool = True) -> Path | None:
    """The folder of a complete earlier download, or None."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError):
        return None
    if not (folder / "config.json").is_file():
        return None
    if not weights:
        return folder
    shards = checkpoint.shard_names(folder)
    return folder if shards and all((folder / shard).is_file() for shard in shards) else None


def _reach(name: str) -> None:
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return  # an answer: the hub can be reached
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # it answered; the hub's client may hold the right certificates
        raise LoadError(f"{_tried(name)}, and the hub cannot be reached ({reason}). {ELSEWHERE}") from error


def _tried(name: str) -> str:
    return f"{name} is not complete in the hub's local cache ({constants.HF_HUB_CACHE})"
