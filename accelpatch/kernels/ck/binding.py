"""ctypes binding of Composable Kernel's gemm_w8a8: which instance runs a product, its limits, the launch.

An instance is a form (with D or without, with scales or without), an output and a tile. D is of E's dtype. Indices are
of 32 bits, so that each matrix, padded to whole tiles, has less than 2^31 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.ck_libraries import LARGE, OUTPUTS, library_of
from accelpatch.kernels.compiling.targets import not_for_ck
from accelpatch.kernels.hip.binding import stream_of
from accelpatch.kernels.spec import Spec
from accelpatch.kernels.triton.launch import cdiv, on_device

ENTRY = "accelpatch_ck_gemm_w8a8"
DTYPES = (torch.int8, torch.float32, torch.bfloat16, torch.float16)  # in the order of OUTPUTS
ACTIVATIONS = ("none", "relu")
LIMIT = 1 << 31  # bytes
VECTOR = 16  # bytes of a load or store of the tiles other than "any"

#: Least number of large tiles in E. Large ones read A and B less often; too few of them leave CUs idle (MI210 has 104,
#: MI300X 304), and small ones are taken. "any" takes what is not on vectors. Not measured.
LEAST = 208
FEW_AND_MANY = (1, 8192)  # rows
_STATUS = {
    1: "a size is out of range, or not a multiple of the tile's vectors",
    2: "a pointer that it needs is null, or not on a vector",
    3: "a row's stride is less than the row",
    4: "this build of Composable Kernel has no matrix instructions for the GPU",
}


class GemmArgs(ctypes.Structure):
    """Mirror of ``GemmArgs`` in host.h; strides in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "d", "row_scale", "column_scale", "e")),
        *((name, ctypes.c_int64) for name in ("batch", "m", "n", "k")),
        *((f"{name}_stride", ctypes.c_int64) for name in "abde"),
        *((f"{name}_batch_stride", ctypes.c_int64) for name in "abde"),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("relu", ctypes.c_int32),
    )


def tile_of(spec: Spec) -> str:
    """The tile for a product of this size."""
    m, n, k, batch = (spec.sizes[name] for name in "MNKB")
    along_n = 1 if _scaled(spec) else VECTOR // spec.dtype.itemsize
    if k % VECTOR or n % along_n or not m:
        return "any"
    large = LARGE[form_of(spec)]
    rows, columns = map(int, large.split("x"))
    return large if cdiv(m, rows) * cdiv(n, columns) * batch >= LEAST else "64x128"


def form_of(spec: Spec) -> str:
    """The form for a product: what E is made of besides A B."""
    with_d = spec.options.get("d") is not None
    if _scaled(spec):
        return "scaled_bias" if with_d else "scaled"
    return "linear" if with_d else "bmm"


def library_name(spec: Spec) -> str:
    """The library of a product."""
    return library_of(form_of(spec), OUTPUTS[DTYPES.index(spec.dtype)], tile_of(spec))


def library_names(spec: Spec, device: Device) -> tuple[str, ...]:
    """The libraries for few and for many rows, to build in advance; none where it does not run."""
    of_rows = [replace(spec, sizes={**spec.sizes, "M": m}) for m in FEW_AND_MANY]
    return tuple(dict.fromkeys(library_name(one) for one in of_rows if why_not(one, device) is None))


def why_not(spec: Spec, device: Device) -> str | None:
    """Why a product cannot run: another GPU, an epilogue or a size that it has not, no library."""
    if other := not_for_ck(device):
        return other
    if missing := _not_covered(spec):
        return missing
    if _bytes(spec) >= LIMIT:
        return "a matrix has 2^31 bytes or more, padded to whole tiles: more than its 32-bit indices reach"
    return libraries.why_not(library_name(spec), device)


def _scaled(spec: Spec) -> bool:
    return bool(spec.options.get("scaled"))


def _not_covered(spec: Spec) -> str | None:
    given, d = spec.options, spec.options.get("d")
    if spec.dtype not in DTYPES:
        return f"its E is int8, float32, bfloat16 or float16, not {spec.dtype}"
    if (activation := given.get("activation", "none")) not in ACTIVATIONS:
        return f"of activations its element operation has ReLU alone, not {activation}"
    for name in ("correction", "residual"):
        if given.get(name):
            return f"its element operation has no {name}"
    return None if d in (None, spec.dtype) else f"its D is of E's dtype, {spec.dtype}, not {d}"


def _bytes(spec: Spec) -> int:
    """The most bytes that its 32-bit offsets have to reach."""
    m, n, k, batch = (spec.sizes[name] for name in "MNKB")
    rows, columns, deep = (cdiv(size, tile) * tile for size, tile in ((m, 256), (n, 128), (k, 64)))
    each = spec.dtype.itemsize
    of_a_batch = max((rows + 1) * deep, (columns + 1) * deep, (rows + 1) * columns * each)
    return max(of_a_batch, batch * max(m * k, n * k, m * n))


def gemm_w8a8(
    a: Tensor, b: Tensor, alpha: float, row_scale: Tensor | None, column_scale: Tensor | None, d: Tensor | None,
    beta: float, correction: Tensor | None, activation: str, residual: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """E[..., M, N] in `dtype`, contiguous, on torch's current stream: the arguments of `gemm_w8a8`, less what
    `why_not` refuses.

    What is not contiguous, or not on 16 bytes, is copied. Raises KernelError for a refused launch.
    """
    assert (correction, residual) == (None, None), "why_not refuses them"
    e = a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=dtype)
    if e.numel() == 0:
        return e
    (m, n), k, batch = e.shape[-2:], a.shape[-1], e.shape[0] if e.dim() == 3 else 1
    scaled = row_scale is not None or column_scale is not None
    options = {"d": None if d is None else d.dtype, "scaled": scaled}
    spec = Spec("gemm_w8a8", {"M": m, "N": n, "K": k, "B": batch}, dtype, options=options)
    tensors: dict[str, Tensor | None] = {
        "a": _aligned(a),
        "b": _aligned(b),
        "d": None if d is None else _aligned(d),
        "e": e,
    }
    if scaled:
        tensors["row_scale"], tensors["column_scale"] = _vector(row_scale, m, a), _vector(column_scale, n, a)
    args = arguments(tensors, spec, alpha, beta, activation)
    with on_device(a):
        check(_entry(library_name(spec), a.device)(ctypes.byref(args), stream_of(a)))
    return e


def arguments(tensors: Mapping[str, Tensor | None], spec: Spec, alpha: float, beta: float, activation: str) -> GemmArgs:
    """The launch arguments for contiguous tensors."""
    m, n, k, batch = (spec.sizes[name] for name in "MNKB")
    d = tensors.get("d")
    vector = d is not None and d.dim() == 1
    return GemmArgs(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        batch=batch, m=m, n=n, k=k, a_stride=k, b_stride=k, e_stride=n, d_stride=0 if vector else n,
        a_batch_stride=m * k, b_batch_stride=n * k, e_batch_stride=m * n, d_batch_stride=0 if vector else m * n,
        alpha=alpha, beta=beta, relu=int(activation == "relu"),
    )  # fmt: skip


def check(status: int) -> None:
    """Raise KernelError for a status other than 0."""
    if status:
        reason = _STATUS.get(status, f"the device's runtime reports error {status - 1000}")
        raise KernelError(f"{ENTRY} was not launched: {reason}")


def _vector(scale: Tensor | None, size: int, like: Tensor) -> Tensor:
    """A vector of scales as float32; ones where it is not given."""
    return like.new_ones(size, dtype=torch.float32) if scale is None else scale.to(torch.float32).contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and on 16 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % VECTOR else tensor


@cache
def _entry(name: str, device: torch.device) -> Any:
    return declared(libraries.library(name, probe(device)))


def declared(library: ctypes.CDLL) -> Any:
    """The function of a library, with its C types declared."""
    entry = getattr(library, ENTRY)
    entry.restype = ctypes.c_int
    entry.argtypes = [ctypes.POINTER(GemmArgs), ctypes.c_void_p]
    return entry
