"""What a plugin leaves in the process is taken out again."""

from __future__ import annotations

import sys

from accelpatch.kernels import added, dispatch


def forget() -> None:
    """No implementation of a user's, and no module of a plugin."""
    added.forget()
    dispatch.forget()
    for name in [name for name in sys.modules if name.startswith("accelpatch_plugin_")]:
        del sys.modules[name]
