"""Weights in every format of the HIP gemv kernels, packed and called, with the float64 weights that they mean."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels.codebooks import CODEBOOKS, E4M3, NVFP4, scale_dtype
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.gpu_libraries import CODES, DTYPES, library_of
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts import compact_tiles, int4_tiles, tiling
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.quant import fp8, int4, int8
from accelpatch.quant.formats import dequantize
from tests.support.gemv_formats import FORMATS as FORMATS
from tests.support.gemv_formats import TIMED, W8A8, W8A8_FP8, Format


@dataclass
class Packed:
    """A packed weight [n, k] and what it means; ``bytes`` is what one product reads of it."""

    format: Format
    n: int
    k: int
    w: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    dense: Tensor | None = None
    shift: int = 0
    interleaved: bool = False
    canonical: tuple[Any, ...] = field(default=())

    def to(self, device: str) -> Packed:
        """The same with the packed tensors on another device; the dense weight stays where it is."""
        held = {key: getattr(self, key) for key in ("w", "scale", "offset")}
        return replace(self, **{key: t.to(device) for key, t in held.items() if t is not None})

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w, self.scale, self.offset) if t is not None)


def _grouped(w: Tensor, group: int) -> Tensor:
    k = w.shape[1]
    size = group or k
    pad = -k % size
    return torch.nn.functional.pad(w.float(), (0, pad)).view(w.shape[0], -1, size)


def _affine(w: Tensor, form: Format, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [N, G, S], scale [N, G], offset of a grouped integer format, all as numbers."""
    g = _grouped(w, form.group or 0)
    low, high = g.amin(-1), g.amax(-1)
    if form.offset in CODEBOOKS:
        most = g.abs().amax(-1).clamp(min=1e-6)
        if form.offset == NVFP4:
            factors = torch.linspace(0.01, 0.02, len(g), dtype=torch.float64)[:, None]
            scale = (most / 6 / factors.float()).to(E4M3).float().clamp(min=2.0**-9)
            book = torch.tensor(CODEBOOKS[NVFP4])
            codes = (g[..., None] / (scale * factors.float())[..., None, None] - book).abs().argmin(-1).float()
            return codes, scale.to(E4M3), factors
        scale = most if form.offset != "e2m1" else (most.log2().floor() - 2).exp2()
        book = torch.tensor(CODEBOOKS[form.offset])
        codes = (g[..., None] / scale[..., None, None] - book).abs().argmin(-1).float()
        return codes, scale.to(scale_dtype(form.offset)), None
    if form.library == "gemv_int8":
        scale = (g.abs().amax(-1) / 127).clamp(min=1e-6).to(dtype)
        return (g / scale.float()[..., None]).round().clamp(-127, 127), scale, None
    if form.offset == "none":
        middle = (form.most + 1) // 2
        scale = (g.abs().amax(-1) / (middle - 1)).clamp(min=1e-6).to(dtype)
        return (g / scale.float()[..., None]).round().clamp(-middle, middle - 1) + middle, scale, None
    scale = ((high - low) / form.most).clamp(min=1e-6).to(dtype)
    offset = (
        (-low / scale.float()).round().clamp(0, form.most).to(dtype) if form.offset == "zero_point" else low.to(dtype)
    )
    base = -offset.float() * scale.float() if form.offset == "zero_point" else offset.float()
    return ((g - base[..., None]) / scale.float()[..., None]).round().clamp(0, form.most), scale, offset


def _dense(codes: Tensor, scale: Tensor, offset: Tensor | None, form: Format, k: int) -> Tensor:
    c, s = codes.double(), scale.double()[..., None]
    if form.library == "gemv_int8":
        return (c * s).flatten(1)[:, :k]
    if form.offset in CODEBOOKS:
        s = s if offset is None else s * offset[..., None]
        return (torch.tensor(CODEBOOKS[form.offset], dtype=torch.float32).double()[codes.long()] * s).flatten(1)[:, :k]
    if offset is None:
        return ((c - (form.most + 1) // 2) * s).flatten(1)[:, :k]
    o = offset.double()[..., None]
    return ((c - o) * s if form.offset == "zero_point" else c * s + o).flatten(1)[:, :k]


def in_tiles(rows: Tensor, interleaved: bool) -> Tensor:
    """Rows [N, ...] as tiles have them; interleaved: 8 of the first half, the gate, and the 8 of the second."""
    if not interleaved:
        return rows
    room = -(-rows.shape[0] // 16) * 8
    halves = [torch.cat((half, half.new_zeros(room - len(half), *half.shape[1:]))) for half in rows.chunk(2)]
    return torch.stack([half.view(-1, 8, *half.shape[1:]) for half in halves], 1).flatten(0, 2)


def _of_nvfp4(table: Tensor, factors: Tensor, steps: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Pairs of scales in e4m3 and factors of rows, in tiles."""
    pairs = torch.nn.functional.pad(table.view(torch.uint8), (0, table.shape[1] % 2)).view(torch.int16)
    tiles = tiling.tile_scales(in_tiles(pairs, interleaved), steps=steps, groups=4, group_shift=0)
    return tiles, tiling.whole_tiles(in_tiles(factors, interleaved)).view(-1, 16)


def pack(w: Tensor, name: str, *, dtype: torch.dtype, interleaved: bool = False, dense: bool = True) -> Packed:
    """Quantises and packs ``w`` [N, K]; with ``dense`` keeps the float64 weight that the pack stands for."""
    form, (n, k) = TIMED[name], w.shape
    if name == "plain":
        held = w.to(dtype).contiguous()
        return Packed(form, n, k, held, dense=held.double() if dense else None)
    if name == "compact":
        held = w.to(torch.bfloat16)
        gate, up = held.chunk(2) if interleaved else (held, None)
        tiles = CompactTiles.pack(gate) if up is None else CompactTiles.pack(gate).pair(CompactTiles.pack(up))
        fours, meaning = tiles.outliers.shape[2] // compact_tiles.FOUR, held.double() if dense else None
        return Packed(form, n, k, tiles.w, tiles.scale, tiles.outliers, meaning, fours, interleaved)
    if name in ("int8", "fp8", W8A8, W8A8_FP8):
        quant = fp8 if name in ("fp8", W8A8_FP8) else int8
        rows = quant.quantize(w)
        return Packed(form, n, k, rows.w, rows.scale, dense=dequantize(rows, torch.float64) if dense else None)
    if name == "fp8_blocks":
        rows = fp8.quantize_blocks(w)
        return Packed(form, n, k, rows.w, rows.scale, dense=dequantize(rows, torch.float64) if dense else None)
    return _in_groups(w, form, dtype, interleaved, dense)


def _in_groups(w: Tensor, form: Format, dtype: torch.dtype, interleaved: bool, dense: bool) -> Packed:
    """As `pack`, of integers and codebooks."""
    n, k = w.shape
    codes, table, offset = _affine(w, form, dtype)
    meaning = _dense(codes, table, offset, form, k) if dense else None
    flat = codes.flatten(1)[:, :k]
    steps = -(-k // form.step)
    if form.library == "gemv_int8":
        held = flat.to(torch.int8).contiguous()
    elif form.library == "gemv_int3":
        held = tiling.tile_int3(in_tiles(flat.to(torch.uint8), interleaved))
    else:
        held = tiling.tile_int4(in_tiles(int4.pack(torch.nn.functional.pad(flat, (0, k % 2))), interleaved))
    group = form.group or 0
    shift = 30 if not group else max(group // form.step, 1).bit_length() - 1
    shape = {
        "steps": steps,
        "groups": max(form.step // group, 1) if group else 1,
        "group_shift": shift,
    }
    if form.offset == NVFP4 and offset is not None:
        beside = _of_nvfp4(table, offset, steps, interleaved)
        return Packed(form, n, k, held, *beside, meaning, 0, interleaved)
    if form.offset in CODEBOOKS:
        table, offset = int4_tiles.tables_of(table)
    tiles = tiling.tile_scales(in_tiles(table, interleaved), **shape)
    beside = None if offset is None else tiling.tile_scales(in_tiles(offset, interleaved), **shape)
    return Packed(form, n, k, held, tiles, beside, meaning, shift, interleaved)


def library_in(folder: Path, name: str) -> Path:
    """A library for this GPU in a folder that `accelpatch build --out` filled."""
    return libraries.place(folder, name, libraries.target(name, probe("cuda"))) / libraries.LIBRARY


class Library:
    """The built libraries of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Callable[..., int]] = {}

    def call(
        self,
        p: Packed,
        x: Tensor,
        y: Tensor,
        *,
        norm: str = "none",
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        activation: str = "none",
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        epsilon: float = 1e-5,
        **tuning: int,
    ) -> None:
        """y[M, N] = epilogue(norm(x) . w^T) on the current stream."""
        at = {"w": p.w, "scale": p.scale, "offset": p.offset, "x": x, "y": y}
        at |= {"norm_weight": norm_weight, "norm_bias": norm_bias, "bias": bias, "residual": residual}
        args = binding.GemvArgs(
            **{key: None if t is None else t.data_ptr() for key, t in at.items()},
            m=x.shape[0],
            n=p.n,
            k=p.k,
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            residual_stride=0 if residual is None else residual.stride(0),
            epsilon=epsilon,
            norm=binding.NORM[norm],
            activation=binding.ACTIVATION[activation],
            offset_kind=CODES[p.format.offset],
            scale_is_bf16=int(p.scale is not None and p.scale.dtype == torch.bfloat16),
            group_shift=p.shift,
            **tuning,
        )
        self._launch(p, args, int(x.dtype == torch.float16))

    def _launch(self, p: Packed, args: binding.GemvArgs, half: int) -> None:
        name = "accelpatch_" + p.format.library
        held = library_of(p.format.library, DTYPES[half], p.format.variant)
        if held not in self.entries:
            self.entries[held] = binding.load(library_in(self.folder, held), name)
        extra = [] if p.format.argument is None else [p.format.argument]
        stream = torch.cuda.current_stream().cuda_stream
        binding.check(self.entries[held](ctypes.byref(args), half, *extra, stream), name)


class Launched(Library):
    """The libraries of this GPU from the user's cache. suffix: of their functions."""

    def __init__(self, suffix: str = "") -> None:
        super().__init__(Path())
        self.suffix = suffix

    def _launch(self, p: Packed, args: binding.GemvArgs, half: int) -> None:
        name = p.format.library + self.suffix
        entry = binding._entry(name, binding.DTYPES[half], p.format.variant, torch.device("cuda", 0))
        extra = [] if p.format.argument is None else [p.format.argument]
        status = entry(ctypes.byref(args), half, *extra, torch.cuda.current_stream().cuda_stream)
        binding.check(status, name)


class Emulated(Library):
    """The products of one form, compiled for the CPU by the SIMT emulator, on tensors of the CPU. suffix: of their
    functions."""

    def __init__(self, held: ctypes.CDLL, suffix: str = "") -> None:
        super().__init__(Path())
        self.held, self.suffix = held, suffix

    def _launch(self, p: Packed, args: binding.GemvArgs, half: int) -> None:
        name = f"accelpatch_{p.format.library}{self.suffix}"
        extra = [] if p.format.argument is None else [p.format.argument]
        binding.check(binding.declared(self.held, name)(ctypes.byref(args), half, *extra, None), name)
