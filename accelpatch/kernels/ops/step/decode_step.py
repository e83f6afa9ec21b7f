"""One decode step, or some of its layers, as one native call on a CPU: see cpu/decode_step.py.

It writes into the step's cache, and into the residual stream and the logits that it is given. Its reference is the
model that the step was read from: tests compare the two.
"""

from __future__ import annotations

from typing import Any

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.decode_step import OP, DecodeStep, launch_, spec
from accelpatch.kernels.spec import Implementation, Kernel, Spec


def reference(*args: Any) -> None:
    """Raises KernelError: there is none without the model."""
    raise KernelError(f"{OP}: it has no reference of its own; accelpatch.unpatch(model) gives the model back")


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `launch_` cannot run a spec; None where it can."""
    return native_library.why_not(device)


KERNELS = {OP: Kernel(DecodeStep.__call__, reference, spec, {"cpu": Implementation(launch_, why_not)})}
