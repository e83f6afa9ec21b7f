"""Fixtures of several files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelpatch import own_code
from accelpatch.kernels.cpu import native_library
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph


@pytest.fixture(params=["cpu", "as a gpu"])
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Native steps of a CPU, and then captured steps, for which a CPU stands for the GPU.

    What a test changed in classes is undone before the last look at them.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as a gpu":
            patch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
            patch.setattr(native_library, "why_not", lambda device: "not in this test")
        yield str(request.param)
    own_code.refresh()
