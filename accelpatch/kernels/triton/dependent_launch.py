"""Kernels that begin while the one before them ends (programmatic dependent launch); Triton has it from 3.4 on."""

from __future__ import annotations

import triton
from triton.language.extra import cuda

HERE = hasattr(cuda, "gdc_wait")

if HERE:

    @triton.jit
    def release() -> None:
        """The next kernel may begin."""
        cuda.gdc_launch_dependents()

    @triton.jit
    def wait() -> None:
        """For the kernel before to end; nothing of its is touched earlier."""
        cuda.gdc_wait()

else:  # Triton looks up every name of a kernel, also in branches that it leaves out

    @triton.jit
    def release() -> None:
        """Nothing."""
        return

    @triton.jit
    def wait() -> None:
        """Nothing."""
        return
