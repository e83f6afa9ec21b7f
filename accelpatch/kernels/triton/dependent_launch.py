"""Programmatic dependent launch: kernels that start before the previous one has ended. Needs Triton 3.4."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

HERE = hasattr(cuda, "gdc_wait")

if HERE:

    @triton.jit
    def release() -> None:
        """Let the next kernel start."""
        cuda.gdc_launch_dependents()

    @triton.jit
    def wait() -> None:
        """Wait for the previous kernel to end; its results must not be read earlier."""
        cuda.gdc_wait()

else:  # Triton looks up every name of a kernel, also in branches that it leaves out

    @triton.jit
    def release() -> None:
        """Does nothing: not supported here."""
        return

    wait = release


@triton.jit
def overlap(DEPENDENT: tl.constexpr) -> None:
    """Let the next kernel start, then wait for the previous one, for a kernel that reads nothing earlier."""
    if DEPENDENT:
        release()
        wait()
