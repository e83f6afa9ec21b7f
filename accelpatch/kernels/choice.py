"""Which of the implementations that can run a call is taken: one table, with what was measured as its data.

An operation has rows; the first that fits a call's Spec and device gives the order in which implementations are tried.
What an implementation cannot do, its own `why_not` says, which is asked after this. One that is absent from an
order can run there, but is not taken unless it is forced. The orders of attention that `accelpatch tune attention`
measured on a machine go before those here (dispatch.order).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accelpatch.device import Device
from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.attention_shape import needs_mask
from accelpatch.kernels.spec import Spec

Range = tuple[int, int | None]  # from, up to; None: no end
EVERY: Range = (0, None)

#: sizes that follow from a Spec. pairs: chosen experts of all tokens; reads: the same, for each expert there is, and
#: rounded up; scores: multiplications for the scores of a row of attention; masked: 1 where torch needs a mask, or 0
DERIVED: Mapping[str, Callable[[Spec], int]] = {
    "pairs": lambda spec: spec.sizes["M"] * spec.sizes["k"],
    "reads": lambda spec: -(-spec.sizes["M"] * spec.sizes["k"] // spec.sizes["E"]),
    "scores": lambda spec: spec.sizes["H"] * spec.sizes["L"] * spec.sizes["S"] * spec.sizes["D"],
    "masked": needs_mask,
}
MASKED: Range = (1, 1)


@dataclass(frozen=True)
class Row:
    """An order of implementations, the preferred one first, and the calls that it is for.

    on: a device's kind, vendor, matrix unit or arch; "*" is any. dtypes: of the Spec; () is any. rows: of x (attention:
    queries). sizes: (from, up to) of a size of the Spec, or of DERIVED. multiples: size -> a divisor of it. options:
    option of the Spec -> its values. note: where it was measured, or why it is so.
    """

    order: tuple[str, ...]
    on: str = "*"
    dtypes: tuple[torch.dtype, ...] = ()
    rows: Range = EVERY
    sizes: Mapping[str, Range] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    note: str = ""

    def fits(self, op: str, spec: Spec, device: Device) -> bool:
        """Whether this row is for such a call."""
        matrix = None if device.facts is None else device.facts.matrix
        if self.on not in ("*", device.kind, device.vendor, matrix, device.arch):
            return False
        if self.dtypes and spec.dtype not in self.dtypes:
            return False
        bounds = dict(self.sizes) if self.rows == EVERY else {rows_of(op): self.rows, **self.sizes}
        return (
            all(_within(_size(name, spec), bound) for name, bound in bounds.items())
            and all(spec.sizes[name] % step == 0 for name, step in self.multiples.items())
            and all(spec.options.get(name) in values for name, values in self.options.items())
        )


def rows_of(op: str) -> str:
    """The size of a Spec that an operation's rows are: of attention its queries."""
    return "L" if op == "flash_attention" else "M"


def _size(name: str, spec: Spec) -> int:
    return DERIVED[name](spec) if name in DERIVED else spec.sizes[name]


def _within(size: int, bound: Range) -> bool:
    least, most = bound
    return least <= size and (most is None or size <= most)


LEAST_EXPERTS = 8  # below so many, chosen pairs are few as well
INT8_WGMMA, INT4_WGMMA = (9, 512), (17, 256)  # rows for which Triton makes floats of codes in registers on Hopper
STREAMED = 64  # rows up to which Triton reads a weight of 8 bits as a GEMV does; it has no gate inside then
WRITTEN_OUT = 65  # rows from which on a 4-bit weight is written out for torch's GEMM

H100, H200, HOPPER = "measured on an H100", "measured on an H200", "measured on Hopper"
ONE_PASS = "a launch reads the weight once for 8 rows"
UNMEASURED = "not measured, and torch's own choice is what a model has without a patch"
BY_DOCUMENTATION = "by ROCm's documentation: AITER, flash-attn, AOTriton (torch's flash back end); not measured"

TRITON, FUSED = (Row(("triton", "torch")),), (Row(("triton", "operations")),)
PACKED, PLAIN = (Row(("cpu", "torch")),), (Row(("torch",)),)
STORED = ("cpu_stored", "torch")  # of weights that a CPU reads as a checkpoint stores them

_FLOAT_GEMM: Mapping[str, Any] = {
    "on": "wgmma", "dtypes": HALVES, "rows": (9, 64), "sizes": {"N": (2048, None)}, "multiples": {"K": 128},
    "note": f"{H200}, for weights of such sizes; on no other GPU",
}  # fmt: skip
_PACKAGES = ("flash_attn_3", "flash_attn_2", "hub")  # which were not installed where others were measured
_NVIDIA = ("sdpa_flash", "sdpa_efficient", "xformers", "eager")
#: torch needs a mask, and cuDNN a plan for every new shape, which takes longer than a short part of a prompt does
_SHORT_MASKED: Mapping[str, Any] = {"rows": (0, 2047), "sizes": {"masked": MASKED}}

#: operation -> rows, the last of which fits every call
TABLE: Mapping[str, tuple[Row, ...]] = {
    "float_linear": (
        Row(("hip", "torch"), rows=(0, 8), note=ONE_PASS),
        Row(("triton", "torch"), **_FLOAT_GEMM),
        Row(("torch",), note="beyond what was measured"),
    ),
    "int8_linear": (
        Row(("hip", "triton", "torch"), rows=(0, 8), note=ONE_PASS),
        Row(("triton_wgmma", "triton", "hip", "torch"), "wgmma", HALVES, INT8_WGMMA, note=H200),
        Row(("triton", "hip", "torch"), note=H200),
    ),
    "int3_linear": PLAIN,  # as int4_linear
    "tiled_int3_linear": (
        Row(("hip", "triton", "torch"), rows=(0, 8), note=ONE_PASS),
        Row(("triton", "hip", "torch"), note="not measured"),
    ),
    "int4_linear": PLAIN,  # row by row as on disk and on CPUs; GPUs hold tiles, the next row
    "tiled_int4_linear": (
        Row(("hip", "triton", "torch"), rows=(0, 8), note=ONE_PASS),
        Row(("triton_wgmma", "hip_gemm", "triton", "hip", "torch"), "wgmma", HALVES, INT4_WGMMA, note=H200),
        Row(("hip_gemm", "triton", "hip", "torch"), note=H200),
    ),
    "compact_linear": (
        Row(("hip", "hip_unpack", "torch"), rows=(0, 24), note=f"{H200}: three passes over the weight"),
        Row(("hip_unpack", "torch"), note=H200),
    ),
    "fp8_linear": (
        Row(("hip", "triton", *STORED), rows=(0, 8), note=ONE_PASS),
        Row(("triton", "triton_wgmma", "hip", *STORED), note="a launch of hip reads the weight anew for each 8 rows"),
    ),
    "quantize_rows": TRITON,
    "gemm_w8a8": (
        Row(("triton", "ck", "int_mm", "torch"), rows=(0, STREAMED), sizes={"B": (1, 1)}, note="it streams the weight"),
        Row(("ck", "triton", "int_mm", "torch")),
    ),
    "gemm_fp8": (
        Row(("triton", "scaled_mm", "torch"), rows=(0, STREAMED), note=f"{HOPPER}: the weight is streamed"),
        Row(("scaled_mm", "triton", "torch"), note=HOPPER),
    ),
    "gated_fp8": (
        Row(("operations",), rows=(0, STREAMED), note="the gate is in tiles alone, and the weight is streamed"),
        Row(("scaled_mm", "triton", "operations"), note=HOPPER),
    ),
    "w8a8_linear": (
        Row(("hip", "triton", "operations"), rows=(0, 8), note=ONE_PASS),
        Row(("operations",), rows=(9, 64), sizes={"K": (32769, None)}, note="Triton quantises no such row"),
        Row(("triton", "hip", "operations"), note=HOPPER),
    ),
    "w8a8_packed": PACKED,
    "int8_embedding": PLAIN,
    "block_linear": (Row(("triton", *STORED)),),
    "block_embedding": PLAIN,
    "packed_linear": PACKED,
    "packed_embedding": PACKED,
    "rmsnorm": TRITON,
    "add_rmsnorm": TRITON,
    "rmsnorm_add": TRITON,
    "rmsnorm_rows": FUSED,
    "add_layernorm": FUSED,
    "layernorm_rows": FUSED,
    "gated_rows": FUSED,
    "activated_rows": FUSED,
    "reorder": FUSED,
    "layernorm_q": TRITON,
    "int8_attention": TRITON,
    "flash_attention": (
        Row(("cpu", "sdpa", "eager"), "cpu", sizes={"scores": (1 << 20, None)}, note="measured on a CPU"),
        Row(("sdpa", "eager"), "cpu", note="the native kernel gains nothing from so few scores"),
        Row(
            ("aiter", "flash_attn_2", "hub", "sdpa_flash", "triton", "sdpa", "sdpa_efficient", "xformers", "eager"),
            "amd", HALVES, note=BY_DOCUMENTATION,
        ),
        Row(
            ("triton", *_PACKAGES, "sdpa", "sdpa_efficient", "xformers", "eager"),
            "wgmma", HALVES, (128, 2047), sizes={"masked": MASKED}, options={"bias": (None,)}, note=H100,
        ),
        Row(
            ("sdpa_cudnn", "triton", *_PACKAGES, "sdpa", "sdpa_efficient", "xformers", "eager"),
            "wgmma", HALVES, (2048, None), sizes={"masked": MASKED}, options={"bias": (None,)}, note=H100,
        ),
        Row(
            ("sdpa_cudnn", "sdpa", *_PACKAGES, "triton", *_NVIDIA),
            "wgmma", HALVES, (128, None), options={"bias": (None,)}, note=H100,
        ),
        Row(("sdpa", *_PACKAGES, "triton", *_NVIDIA), "nvidia", HALVES, **_SHORT_MASKED, note=UNMEASURED),
        Row(("sdpa", *_PACKAGES, "triton", "sdpa_cudnn", *_NVIDIA), "nvidia", HALVES, note=UNMEASURED),
        Row(("sdpa", "triton", "sdpa_efficient", "eager"), note="float32 and float64 on a GPU"),
    ),
    "rotary_cos_sin": TRITON,
    "gated_activation": TRITON,
    "decode_attention": (Row(("hip", "triton", "torch")),),
    "prepare_query_key": TRITON,
    "paged_attention": (Row(("cpu", "triton", "torch")),),
    "prompt_rotary": TRITON,
    "decode_step": (Row(("cpu",)),),
    "greedy": TRITON,
    "step_end": TRITON,
    "experts": (
        Row(("hip", "triton", "torch"), sizes={"pairs": (0, LEAST_EXPERTS)}, note=H100),
        Row(("hip", "triton", "torch"), sizes={"reads": (0, 2)}, note=H100),
        Row(("triton", "torch"), note=f"{H100}: each expert is read once"),
    ),
    "routed_experts": (
        Row(("hip", "operations"), sizes={"pairs": (0, LEAST_EXPERTS)}, note=H100),
        Row(("hip", "operations"), sizes={"reads": (0, 2)}, note=H100),
        Row(("operations",), note=f"{H100}: each expert is read once"),
    ),
    "packed_experts": PACKED,
    "choose_experts": TRITON,
    "fused_linear": (Row(("hip", "operations")),),
    "adapted_linear": (Row(("hip", "operations")),),
    "large_m_linear": (  # with a gate; without one, a weight that is written out
        Row(("triton", "operations"), **_FLOAT_GEMM, options={"weight": ("float_linear",), "many": (False,)}),
        Row(("operations",), "wgmma", HALVES, INT4_WGMMA, options={"weight": ("tiled_int4_linear",)}, note=H200),
        Row(("hip_gemm", "operations"), rows=(9, 64), options={"weight": ("tiled_int4_linear",)}, note=H200),
        Row(("triton", "operations"), rows=(STREAMED + 1, None), options={"weight": ("w8a8_linear",)}, note=HOPPER),
        Row(("triton", "operations"), rows=(WRITTEN_OUT, None), options={"many": (True,)}, note=H200),
        Row(("operations",)),
    ),
}  # fmt: skip


def row(op: str, spec: Spec, device: Device) -> Row:
    """The row of TABLE for a call of an operation."""
    return next(one for one in TABLE[op] if one.fits(op, spec, device))


def few(pairs: int, experts: int) -> bool:
    """Whether each chosen expert of each token is read for itself: fewer than would come together in one."""
    return pairs <= max(experts, LEAST_EXPERTS)
