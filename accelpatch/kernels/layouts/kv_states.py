"""Keys or values of a KV cache in 8 bits, or in another float than the model's: the layouts of `runtime: kv_cache`.

    q[B, Hkv, L, D]        codes: int8, e4m3fn (OCP's 8-bit float, largest 448) or bfloat16
    scale[B, Hkv, L]       bfloat16, one of each token and head; none of bfloat16 codes
    x = q * scale          scale = absmax of a head's row / 127 (fp8: / 448); q = x / scale to the nearest, ties to even

Scales in 16 bits cost a head of 128 columns 1.6% of its bytes, and a head of 64 3.1%. They are rounded to the nearest,
so that the largest code is 127 always: what was read from a cache and is written again gives the same codes (of models
in 16 bits, up to their own rounding). Nothing overflows, since a scale follows the largest number of its row. A row
with an infinity or a NaN is read as NaN, all of it: a float cache would give NaN for the whole head too, where such a
key is seen, and for one column where it is a value.

QuantizedStates are read and written by indices, as tensors are: `states[:, :, a:b]` are floats, and assigning floats
rounds them. Whatever holds the keys and values of a static cache works with both. The format's sizes are also in
recipe/schema.py (KV_CACHES), for plans.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.spec import Described

FLOAT, BF16, INT8, FP8 = "float", "bf16", "int8", "fp8"
CODES = {BF16: torch.bfloat16, INT8: torch.int8, FP8: torch.float8_e4m3fn}
LARGEST = {INT8: 127.0, FP8: 448.0}  # the largest code of each format with scales
SCALE = torch.bfloat16


@dataclass(frozen=True, eq=False)
class QuantizedStates(Described):
    """Keys or values of one layer. format: of CODES. q[B, Hkv, L, D], scale[B, Hkv, L] or None. dtype: of the floats
    that are read and written."""

    format: str
    q: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    @property
    def facts(self) -> Hashable:
        """Format, sizes and dtypes, of scales too: what is checked before a call."""
        forms = tuple((one.shape, one.dtype, one.device) for one in self.tensors)
        return self.format, self.dtype, self.q.dtype, forms

    @property
    def shape(self) -> torch.Size:
        """[B, Hkv, L, D]."""
        return self.q.shape

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.q.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, 8-bit ones as int8 bytes, and scales."""
        q = self.q if self.format == BF16 else self.q.view(torch.int8)
        return (q,) if self.scale is None else (q, self.scale)

    def is_contiguous(self) -> bool:
        """Whether codes and scales are."""
        return all(one.is_contiguous() for one in self.tensors)

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, places: Any) -> Tensor:
        """Floats at these places; an index leaves the last dimension alone."""
        bytes_of, *scales = self.tensors
        q = bytes_of[places].view(self.q.dtype).to(self.dtype)
        return (q * scales[0][places].unsqueeze(-1)).to(self.dtype) if scales else q

    def __setitem__(self, places: Any, states: Tensor) -> None:
        q, scale = rounded(states, self.format)
        tensors = self.tensors
        tensors[0][places] = q.view(tensors[0].dtype)
        if scale is not None:
            tensors[1][places] = scale

    def part(self, rows: slice) -> QuantizedStates:
        """Those of some rows, where they lie."""
        scale = None if self.scale is None else self.scale[rows]
        return QuantizedStates(self.format, self.q[rows], scale, self.dtype)


States = Tensor | QuantizedStates


def rounded(states: Tensor, form: str) -> tuple[Tensor, Tensor | None]:
    """(codes of states[..., D], scales[...] or None) in a format of CODES."""
    if form == BF16:
        return states.to(torch.bfloat16), None
    wide, most = states.to(torch.float32), LARGEST[form]
    scale = (wide.abs().amax(-1) / most).to(SCALE)
    by = scale.to(torch.float32).unsqueeze(-1)
    codes = torch.where((by > 0) & by.isfinite(), wide / by, 0.0).clamp(-most, most)
    return (codes.round() if form == INT8 else codes).to(CODES[form]), scale


def zeros(form: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> States:
    """Empty keys or values[B, Hkv, L, D]. form: FLOAT for a tensor of `dtype`, or of CODES; codes that a model makes
    itself (dtype int8, of static scales) are kept as they are."""
    if form == FLOAT or not dtype.is_floating_point or CODES[form] == dtype:
        return torch.zeros(shape, dtype=dtype, device=device)
    q = torch.zeros(shape, dtype=torch.bfloat16 if form == BF16 else torch.int8, device=device).view(CODES[form])
    scale = torch.zeros(shape[:-1], dtype=SCALE, device=device) if form in LARGEST else None
    return QuantizedStates(form, q, scale, dtype)


def format_of(states: States) -> str:
    """FLOAT for a tensor, else the format."""
    return FLOAT if isinstance(states, Tensor) else states.format


def scales_why_not(states: States) -> str | None:
    """Why codes and scales do not belong together: kernels trust pointers and sizes; None where they do."""
    if isinstance(states, Tensor) or (states.format not in LARGEST and states.scale is None):
        return None
    due, scale = list(states.shape[:3]), states.scale
    if states.q.dtype != CODES[states.format]:
        return f"a cache in {states.format} has codes in {CODES[states.format]}, not {states.q.dtype}"
    if scale is None or list(scale.shape) != due or scale.dtype != SCALE or scale.device != states.device:
        got = "none" if scale is None else f"{list(scale.shape)} {scale.dtype} on {scale.device}"
        return f"a cache in {states.format} has scales of {due} in {SCALE} on {states.device}, not {got}"
    return None


def floats(states: States) -> Tensor:
    """All of them as a float tensor; a tensor as it is."""
    return states if isinstance(states, Tensor) else states[:]


def tensors_of(states: States) -> tuple[Tensor, ...]:
    """The tensors [B, Hkv, L, ...] of the states."""
    return (states,) if isinstance(states, Tensor) else states.tensors


def part_of(states: States, rows: slice) -> States:
    """Those of some rows, where they lie."""
    return states[rows] if isinstance(states, Tensor) else states.part(rows)


def copy_first_(states: States, larger: States) -> None:
    """Copy all slots of `states` into the first ones of `larger`, which are of the same format."""
    capacity = states.shape[2]
    for source, target in zip(tensors_of(states), tensors_of(larger), strict=True):
        target[:, :, :capacity].copy_(source)
