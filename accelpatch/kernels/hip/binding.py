"""The C interface of the device library, by ctypes: the launch's arguments and what its status codes mean."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from accelpatch.errors import KernelError

_POINTERS = ("w", "scale", "offset", "x", "norm_weight", "norm_bias", "bias", "residual", "y")
_SIZES = ("m", "n", "k", "x_stride", "residual_stride", "y_stride")
_FLAGS = (
    "norm",
    "activation",
    "offset_kind",
    "scale_is_bf16",
    "group_shift",
    "blocks",
    "depth",
    "prefetch",
    "dependent",
)

NORM = {"none": 0, "rms": 1, "rms_plus_one": 2, "layer": 3}
ACTIVATION = {"none": 0, "silu_gate": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4, "silu": 5}
OFFSET = {"none": 0, "zero_point": 1, "minimum": 2}
_STATUS = {
    1: "a size is out of range",
    2: "a pointer that the format needs is null",
    3: "the activations do not fit in the device's shared memory",
    4: "no kernel for this group size",
}


class GemvArgs(ctypes.Structure):
    """Mirror of ``GemvArgs`` in gemv.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [("epsilon", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in _FLAGS]
        + [("trace", ctypes.c_void_p)]
    )


def load(path: Path, function: str) -> Any:
    """The library's entry ``function(args, dtype[, format], stream) -> status``."""
    entry = getattr(ctypes.CDLL(str(path)), function)
    entry.restype = ctypes.c_int
    last = [ctypes.c_int] if function != "accelpatch_gemv" else []
    entry.argtypes = [ctypes.POINTER(GemvArgs), ctypes.c_int, *last, ctypes.c_void_p]
    return entry


def check(status: int, function: str) -> None:
    """Raises KernelError for every status but 0."""
    if status:
        reason = _STATUS.get(status, f"the device's runtime reports error {status - 1000}")
        raise KernelError(f"{function} was not launched: {reason}")
