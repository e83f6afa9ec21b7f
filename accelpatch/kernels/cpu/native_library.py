"""ctypes binding of the native CPU library: structures and functions as in cpu/accelpatch_cpu.h."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import openmp

# What the library reads and writes, whatever torch's default dtype and device are.
PLAIN: Any = {"dtype": torch.float32, "device": "cpu"}
DENSE, INT8, INT4, W8A8, TABLE, Q4_K, Q6_K, INT3 = 0, 1, 2, 3, 4, 5, 6, 7
OFFSETS = {"none": 0, "minimum": 1, "zero_point": 2}
E4M3_SCALES = 2  # of half_scales
ISAS = ("portable", "avx2", "avx512", "dotprod")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
EXPERT_ACTIVATIONS = ACTIVATIONS | {"clamped_swiglu": 4}
MAX_BATCH, MAX_THREADS, ROWS, COLUMNS, MAX_EXPERTS, MAX_CHOSEN = 8, 64, 16, 32, 1024, 64
MAX_STORED = 64  # rows of x, at most, of a linear layer that reads the weight in its stored format
_REASONS = {
    1: "its arguments do not fit together",
    2: "there is not enough memory",
    3: "it is not supported here",
}


class Linear(Structure):
    """Mirror of `ap_linear`."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "half_scales", "offset")),
        ("input_scale", c_float),
        *((name, c_int64) for name in ("n", "k", "group")),
        *((name, c_void_p) for name in ("data", "bias", "order", "table")),
        ("rank", c_int64),
        *((name, c_int32) for name in ("factors", "reserved")),
        *((name, c_void_p) for name in ("down", "up")),
    )


LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
CROSS = ("cross_q", "cross_o")  # of the attention to an encoder's tokens
NORMS = (
    "attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm", "cross_norm", "q_norm", "k_norm",
)  # fmt: skip


class Norm(Structure):
    """Mirror of `ap_norm`."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("layer", c_int32))


class Layer(Structure):
    """Mirror of `ap_layer`."""

    _fields_ = (
        *((name, Linear) for name in (*LINEARS, *CROSS)),
        *((name, Norm) for name in NORMS),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("window", c_int64),
        *((name, c_float) for name in ("attention_scale", "attention_softcap")),
        *((name, c_int32) for name in ("rope", "activation", "cache", "normalise")),
        ("sinks", c_void_p),
        ("router", Linear),
        *((name, c_int64) for name in ("expert_bytes", "down_bytes", "chosen")),
        *((name, c_float) for name in ("alpha", "limit")),
        *((name, c_void_p) for name in ("cross_keys", "cross_values")),
        ("cross_scale", c_float),
        ("post", c_int32),
    )


class Encoded(Structure):
    """Mirror of `ap_encoded`."""

    _fields_ = (
        *((name, c_int64) for name in ("texts", "length")),
        *((name, c_void_p) for name in ("text", "ends", "mask")),
    )


class Model(Structure):
    """Mirror of `ap_model`."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "head_dim", "max_batch", "length")),
        ("layer", POINTER(Layer)),
        ("embedding", Linear),
        ("head", Linear),
        ("final_norm", Norm),
        ("inverse_frequency", c_void_p * 2),
        ("rope_scaling", c_float * 2),
        ("embedding_scale", c_float),
        ("logits_softcap", c_float),
        ("one_sequence", c_int64),
        ("pages", c_int64),
        ("position_rows", c_int64),
        ("positions", c_void_p),
        ("embedding_norm", Norm),
        ("biased_heads", c_int64),
        ("score_bias", c_void_p),
        ("encoded", Encoded),
    )


class Attention(Structure):
    """Mirror of `ap_attention`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "out", "slots", "starts")),
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "d", "batch_stride", "head_stride", "window")),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    )


class Pages(Structure):
    """Mirror of `ap_pages`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "out", "index", "starts", "ends")),
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "d", "tokens")),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    )


class Stored(Structure):
    """Mirror of `ap_stored`."""

    _fields_ = (
        *((name, c_int32) for name in ("form", "reserved")),
        *((name, c_int64) for name in ("n", "k", "scales")),
        *((name, c_void_p) for name in ("data", "scale", "bias")),
    )


_LINEAR, _P = POINTER(Linear), c_void_p
#: function -> (result, arguments)
SIGNATURES = {
    "ap_best_isa": (c_int, ()),
    "ap_use_isa": (c_int, (c_int,)),
    "ap_isa": (c_int, ()),
    "ap_use_team": (None, (_P, _P, _P)),
    "ap_pack_bytes": (c_int64, (_LINEAR,)),
    "ap_pack": (c_int, (_LINEAR, _P, _P, _P, _P)),
    "ap_unpack": (c_int, (_LINEAR, _P, _P, _P, _P)),
    "ap_linear_run": (c_int, (_LINEAR, _P, c_int64, c_int64, _P, c_int64, c_int, c_int)),
    "ap_gather": (c_int, (_LINEAR, _P, c_int64, _P)),
    "ap_panels_run": (c_int, (_LINEAR, _P, c_int64, c_int64, _P, c_int64, c_int)),
    "ap_gradient_run": (c_int, (_LINEAR, _P, c_int64, c_int64, _P, c_int64, c_int)),
    "ap_stored_run": (c_int, (POINTER(Stored), _P, c_int64, c_int64, _P, c_int64, c_int)),
    "ap_stored_values": (c_int, (POINTER(Stored), _P, c_int)),
    "ap_rmsnorm": (c_int, (_P, _P, _P, c_float, c_int64, c_int64, _P, _P, c_int)),
    "ap_rope_": (c_int, (_P, _P, _P, c_int64, c_int64, c_int64)),
    "ap_gated": (c_int, (_P, _P, c_int, c_int64, _P, c_int)),
    "ap_argmax": (c_int64, (_P, c_int64)),
    "ap_attention_run": (c_int, (POINTER(Attention), c_int)),
    "ap_pages_run": (c_int, (POINTER(Pages), c_int)),
    "ap_step_create": (c_int, (POINTER(Model), c_int, POINTER(_P))),
    "ap_step_free": (None, (_P,)),
    "ap_step_run": (c_int, (_P, c_int64, _P, _P, _P, _P, c_int64, c_int64, _P, _P, c_int)),
    "ap_step_run_pages": (c_int, (_P, c_int64, _P, _P, _P, _P, _P, c_int64, _P, c_int)),
    "ap_advise_large_pages": (None, (_P, c_int64)),
    "ap_read_limit": (c_double, (_P, c_int64, c_int, c_int)),
}


@cache
def native() -> ctypes.CDLL:
    """The native library, built on first use. Raises KernelError where that fails."""
    library = libraries.library("cpu", probe("cpu"))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.ap_use_team(*openmp.team())
    openmp.alone_after_fork()
    return library


def why_not(device: Device) -> str | None:
    """Why there is no native library for `device`, found without compiling; None where there is."""
    if device.kind != "cpu":
        return f"it runs on a CPU, not on {device.name}"
    return libraries.why_not("cpu", device)


@cache
def say_where_missing(device: Device) -> None:
    """Say on stderr, once a process, that a CPU has no native library, what follows, and what helps."""
    if device.kind == "cpu" and (reason := why_not(device)):
        print(
            "accelpatch: without native CPU kernels linear layers stay as they are, and models that were saved"
            f" quantised are slow: {reason}",
            file=sys.stderr,
            flush=True,
        )


def check(status: int, what: str) -> None:
    """Raise KernelError for a status other than AP_OK."""
    if status:
        raise KernelError(f"the native CPU kernel refused {what}: {_REASONS.get(status, status)}")


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element; None (NULL) for None."""
    return None if tensor is None else tensor.data_ptr()


def threads() -> int:
    """Number of threads that torch may use now, at most the library's limit."""
    return min(torch.get_num_threads(), MAX_THREADS)


def isa() -> str:
    """The code path in use: "avx512", "avx2", "dotprod" (64-bit ARM's dot products of bytes) or "portable"."""
    return ISAS[native().ap_isa()]


def isas() -> tuple[str, ...]:
    """The code paths that this machine has."""
    best = native().ap_best_isa()
    return (ISAS[0], ISAS[best]) if ISAS[best] == "dotprod" else ISAS[: best + 1]


def use_isa(name: str | None) -> None:
    """Use another code path from now on; None for the best. Raises KernelError where the CPU does not support it."""
    check(native().ap_use_isa(-1 if name is None else ISAS.index(name)), f"the path {name}")


def describe() -> str:
    """Name of this CPU and the code path in use."""
    return f"{probe('cpu').name} ({isa()})"
