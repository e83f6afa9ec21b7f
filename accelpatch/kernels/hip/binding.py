"""ctypes binding of the device library: launches from tensors, their limits, and the meaning of status codes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.gpu_libraries import CODES, FUNCTIONS, library_of
from accelpatch.kernels.compiling.gpu_libraries import DTYPES as DTYPE_NAMES
from accelpatch.kernels.hip.low_rank import LowRank, sizes_of
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.spec import Described, Spec
from accelpatch.kernels.triton.launch import on_device

#: most rows of x of a launch, which reads the weights for 8 rows each time; from 9 rows on other kernels go first
MAX_ROWS = 64
K_TILE = 4096  # values of K that a product stages at once, and so what it may begin with
SENTINEL = -1  # the 16 bits, as int16, of an output that is yet to be written: no kernel stores them, NaN is others
MAX_GEMV_ROWS = 8  # rows per pass over the weight; a row's bits do not depend on their number
DTYPES = (torch.bfloat16, torch.float16)  # dtypes of x and y, numbered as in the C interface

_POINTERS = ("w", "scale", "offset", "x", "norm_weight", "norm_bias", "bias", "residual", "y", "producer", "consumer")
_SIZES = ("producer_columns", "consumer_columns", "m", "n", "k", "x_stride", "residual_stride", "y_stride")
_FLAGS = (
    "norm",
    "activation",
    "offset_kind",
    "scale_is_bf16",
    "group_shift",
    "blocks",
    "shallow",
    "dependent",
)
# at the end, of functions with adapters alone
_LOW_RANK = ("down", "up", "low")
_LOW_RANK_SIZES = ("rank", "ranks", "second_part", "third_part")

# entries without a format argument
_FORMLESS = (
    "accelpatch_gemv",
    "accelpatch_gemv_low_rank",
    "accelpatch_gemv_w8a8",
    "accelpatch_gemv_compact",
    "accelpatch_unpack_compact",
)
OWN_FP8 = ("gemv_w8a8_fp8",)  # functions whose variants are forms of 8-bit floats, of which an arch has one or none
NORM = {"none": 0, "rms": 1, "rms_plus_one": 2, "layer": 3}
ACTIVATION = {"none": 0, "silu_gate": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4, "silu": 5}
_STATUS = {
    1: "a size is out of range",
    2: "a pointer that it needs is null, or not aligned to 16 bytes where it must be",
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
        + [(name, ctypes.c_void_p) for name in _LOW_RANK]
        + [(name, ctypes.c_int32) for name in _LOW_RANK_SIZES]
    )


def library_name(function: str, dtype: torch.dtype, variant: str = "") -> str:
    """The library of a function for x of a dtype of DTYPES, in one of its variants (compiling/gpu_libraries.py)."""
    return library_of(function, DTYPE_NAMES[DTYPES.index(dtype)], variant)


def load(path: Path, function: str) -> Any:
    """The function ``function(args, dtype[, format], stream) -> status`` of the library at `path`."""
    return declared(ctypes.CDLL(str(path)), function)


def declared(library: ctypes.CDLL, function: str) -> Any:
    """A function of the library, with its C types declared."""
    entry = getattr(library, function)
    entry.restype = ctypes.c_int
    last = [] if function in _FORMLESS else [ctypes.c_int]
    entry.argtypes = [ctypes.POINTER(GemvArgs), ctypes.c_int, *last, ctypes.c_void_p]
    return entry


def check(status: int, function: str) -> None:
    """Raise KernelError for a status other than 0."""
    if status:
        reason = _STATUS.get(status, f"the device's runtime reports error {status - 1000}")
        raise KernelError(f"{function} was not launched: {reason}")


@dataclass(frozen=True, eq=False)
class Signal(Described):
    """A producer-consumer flag: the next kernel starts on the first columns of y before all of y is written.

    number: int32[2] zeros, which both leave so; of these two kernels alone, and on one stream at a time. columns: whole
    tiles of 16 (of a gate: 8); for a product that consumes them, a multiple of K_TILE. It has an effect within
    `weight_prefetch`, for up to MAX_GEMV_ROWS rows, on Hopper and later: attention waits for it where each row has one
    new token, a product that stages its input in K tiles before those that lie within these columns.

    words: int16[columns of y], the buffer for y of a single row: a word other than SENTINEL has been written, so the
    flag need not be waited for. It is reset before the producer starts.
    """

    number: Tensor
    columns: int
    words: Tensor

    @property
    def facts(self) -> Hashable:
        """No choice depends on a flag itself."""
        return None


def signal_arguments(signal: Signal | None, role: str) -> dict[str, int]:
    """The launch arguments for a flag. role: "producer" or "consumer"."""
    if signal is None or not _local.prefetchable:
        return {}
    return {role: signal.number.data_ptr(), f"{role}_columns": signal.columns}


def why_not(spec: Spec, device: Device, function: str, variant: str = "") -> str | None:
    """Why a call of a function cannot run: no library of it, activations not of 16 bits, 8-bit floats that are not the
    arch's own, or too large a size."""
    if spec.dtype not in DTYPES:
        unfit = f"its activations are bfloat16 or float16, not {spec.dtype}"
        return libraries.why_not(library_name(function, DTYPES[0], variant), device) or unfit
    if reason := libraries.why_not(library_name(function, spec.dtype, variant), device):
        return reason
    if function in OWN_FP8 and device.facts and (reason := device.facts.why_not_fp8(variant)):
        return reason
    n, k = spec.sizes["N"], spec.sizes["K"]
    return None if n < 1 << 31 and k < 1 << 27 else f"N = {n} is 2^31 or more, or K = {k} 2^27 or more"


class _Local(threading.local):
    prefetchable = False


_local = _Local()


@contextmanager
def weight_prefetch() -> Iterator[None]:
    """Context manager: in this thread, a launch may read its weights while the kernel before it still runs.

    For attention this means the cache, slot, positions and mask. The caller must know that no kernel in the stream
    still writes them, as in a captured step: a kernel without early launch must lie in between. Activations are always
    waited for. It has an effect on Hopper and later.
    """
    before, _local.prefetchable = _local.prefetchable, True
    try:
        yield
    finally:
        _local.prefetchable = before


def prefetchable() -> bool:
    """Whether this thread is within `weight_prefetch`."""
    return _local.prefetchable


def launch(
    weight: WeightArguments,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    norm: str = "none",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    epsilon: float = 1e-5,
    activation: str = "none",
    residual: Tensor | None = None,
    producer: Signal | None = None,
    consumer: Signal | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """y[..., N] = activation(norm(x[..., K]) @ w^T + bias) + residual, in x's dtype, on torch's current stream.

    x and all vectors bfloat16 or float16 alike; other dtypes and strides are copied. norm: a key of NORM, over K, with
    norm_weight[K] and norm_bias[K]. activation: a key of ACTIVATION; with "silu_gate" the first half of w's rows is the
    gate, and y and residual have N / 2 columns. producer: flag for y, a single row of which lies in its `words` until
    they are reset; consumer: flag for x. low_rank: adapters inside. Raises KernelError for a refused launch.
    """
    n = weight.n // 2 if activation == "silu_gate" else weight.n
    rows, y = _rows(x, weight.k), _made(x, n, producer)
    if y.numel() == 0:
        return y
    added = None if residual is None else _rows(residual.to(x.dtype), n)
    tensors = dict(zip(("bias", "norm_weight", "norm_bias"), _alike(x, bias, norm_weight, norm_bias), strict=True))
    tensors |= {"w": weight.w, "scale": weight.scale, "offset": weight.offset, "x": rows, "y": y, "residual": added}
    tensors |= {} if low_rank is None else low_rank.tensors()
    args = GemvArgs(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        m=rows.shape[0], n=weight.n, k=weight.k, x_stride=rows.stride(0), y_stride=n,
        epsilon=epsilon, residual_stride=0 if added is None else added.stride(0), norm=NORM[norm],
        activation=ACTIVATION[activation], **_form_of(weight), **sizes_of(low_rank),
        **signal_arguments(producer, "producer"), **signal_arguments(consumer, "consumer"),
    )  # fmt: skip
    _start(weight, args, x)
    return y


def _form_of(weight: WeightArguments) -> dict[str, int]:
    """The launch arguments that say how the weight is to be read."""
    return {
        "offset_kind": CODES[weight.offset_kind], "group_shift": weight.group_shift,
        "scale_is_bf16": int(weight.scale is not None and weight.scale.dtype == torch.bfloat16),
        "dependent": 0 if _local.prefetchable and weight.prefetchable else -1,
    }  # fmt: skip


def unpack(weight: WeightArguments, unpacked: Tensor, *, interleaved: bool) -> None:
    """Unpack a compact weight into unpacked[N, K], contiguous. interleaved: gates and ups alternate; gates go first."""
    args = GemvArgs(
        w=weight.w.data_ptr(), scale=_address(weight.scale), offset=_address(weight.offset), y=unpacked.data_ptr(),
        n=weight.n, k=weight.k, y_stride=weight.k, group_shift=weight.group_shift,
        activation=ACTIVATION["silu_gate" if interleaved else "none"],
    )  # fmt: skip
    _start(replace(weight, function="unpack_compact"), args, unpacked)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _made(x: Tensor, n: int, producer: Signal | None) -> Tensor:
    """Memory for y[..., n]: for a single row with a producer, its `words`."""
    shape = (*x.shape[:-1], n)
    if producer is None or x.shape[:-1].numel() != 1:
        return x.new_empty(shape)
    return producer.words.view(x.dtype).view(shape)


def _start(weight: WeightArguments, args: GemvArgs, x: Tensor) -> None:
    name = f"accelpatch_{weight.function}"
    form = () if name in _FORMLESS else (_form(weight),)
    with on_device(x):
        entry = _entry(weight.function, x.dtype, weight.variant, x.device)
        check(entry(ctypes.byref(args), DTYPES.index(x.dtype), *form, stream_of(x)), name)


def _form(weight: WeightArguments) -> int:
    """The format argument: the weight's own, or the number of its variant."""
    return FUNCTIONS[weight.function].variants[weight.variant] if weight.form is None else weight.form


def stream_of(x: Tensor) -> int:
    """Torch's current stream on x's device, as a C pointer."""
    stream: int = torch._C._cuda_getCurrentRawStream(x.device.index)
    return stream


@cache
def _entry(function: str, dtype: torch.dtype, variant: str, device: torch.device) -> Any:
    library = libraries.library(library_name(function, dtype, variant), probe(device))
    return declared(library, f"accelpatch_{function}")


def _alike(x: Tensor, *vectors: Tensor | None) -> list[Tensor | None]:
    """The vectors in x's dtype, contiguous."""
    return [None if one is None else one.to(x.dtype).contiguous() for one in vectors]


def _rows(values: Tensor, columns: int) -> Tensor:
    """[M, columns] of values[..., columns] with contiguous rows; copied only where needed."""
    flat = values.reshape(-1, columns)
    return flat if flat.stride(1) == 1 or columns == 1 else flat.contiguous()
