"""The class that a patched model has: its own, with what would silently go wrong refused or left out."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from accelpatch.errors import PatchError


@functools.cache
def patched_class(cls: Any) -> type[nn.Module]:
    """A subclass of `cls` under the same name; setting the class back to `cls` undoes it."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    refused = {name: _refusing(name, advice) for name, advice in REFUSED.items() if hasattr(cls, name)}
    kept = {"tie_weights": _keep_ties} if hasattr(cls, "tie_weights") else {}
    return type(cls.__name__, (cls,), body | refused | kept)


# transformers would write tensors under names that it cannot read back, or grow a table that is packed.
REFUSED = {
    "save_pretrained": "has no format for a patched model yet; call accelpatch.unpatch(model) and save the original",
    "push_to_hub": "has no format for a patched model yet; call accelpatch.unpatch(model) and push the original",
    "resize_token_embeddings": "would change packed weights; call accelpatch.unpatch(model), resize, and patch again",
}


def _refusing(name: str, advice: str) -> Any:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise PatchError(f"{name} {advice}")

    refuse.__name__ = name
    return refuse


def _keep_ties(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Tied replacements share one pack already; transformers would put a float weight back beside it."""
