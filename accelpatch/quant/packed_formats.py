"""Quantised weights as GPTQ, AWQ and compressed-tensors pack them, in the canonical form
(kernels/layouts/row_major.py).

    GPTQ                qweight int32 [K bits / 32, N], qzeros [G, N bits / 32], scales [G, N], g_idx[K]; of 3 bits a
                        column's codes follow each other bit after bit, 32 in three words
    AWQ, GEMM           qweight int32 [K, N / 8], qzeros [G, N / 8], scales [G, N]; eight columns of a word interleaved
    AWQ, GEMV           qweight int32 [N, K / 8], qzeros [N, W], scales [N, 8 W]; padded behind the last group
    compressed-tensors  weight_packed int32 [N, K bits / 32], weight_scale [N, G], weight_zero_point [N bits / 32, G];
                        or weight[N, K] int8 or e4m3 with weight_scale [N, 1] or [1]

w[n, k] = scale[n, g] (code[n, k] - zero[n, g]). Codes, scales and zero points stay as they are; columns of act-order
(desc_act) are sorted by their groups, and the order is kept as a tensor of its own: nothing is rounded again. What
cannot be so is refused with a KernelError that begins with the tensor's name. Sources: GPTQModel 7.7, AutoAWQ 0.2.9,
compressed-tensors of llm-compressor 0.14, whose checkpoints the tests read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int3Rows, Int4Rows, Int8Rows
from accelpatch.kernels.layouts.w8a8_rows import W8A8Rows
from accelpatch.kernels.ops.linear import int3_linear
from accelpatch.quant import fp8, int4

Tensors = Mapping[str, Tensor | None]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of eight is in this field
WORD = 32
FP8 = tuple(fp8.dtype_of(fnuz=fnuz) for fnuz in (False, True))
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GPTQ_FORMS = ("gptq", "gptq_v2")


def gptq(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int8Rows | Int4Rows | Int3Rows:
    """A linear layer[n, k] of GPTQ. config: bits, sym, and checkpoint_format or format; neither: v1."""
    bits = bits_of(config, (3, 4, 8))
    form = str(config.get("checkpoint_format") or config.get("format") or GPTQ_FORMS[0])
    if form not in GPTQ_FORMS:
        raise KernelError(f"qweight: GPTQ's format {form!r} is not read: {' and '.join(GPTQ_FORMS)} are")
    _whole_words(WORD if bits == 3 else WORD // bits, N=n, K=k)
    scales = _float(tensors, "scales", (None, n))
    groups = scales.shape[0]
    codes = unpacked(_words(tensors, "qweight", (k * bits // WORD, n)).t(), bits, k)
    words = _words(tensors, "qzeros", (groups, n * bits // WORD))
    if form == GPTQ_FORMS[0] and bits != 3:  # v1 stores them less one
        words = (words.long() + int("1" * 8 if bits == 4 else "01010101", 16)).to(torch.int32)
    zeros = unpacked(words, bits, n).t()
    zeros = zeros + 1 if form == GPTQ_FORMS[0] and bits == 3 else zeros
    weight: Int8Rows | Int4Rows | Int3Rows = made(
        codes, scales.t(), zeros, bits, bool(config.get("sym", True)), order_of(tensors, "g_idx", groups, k)
    )
    return weight


def order_of(tensors: Tensors, name: str, groups: int, k: int) -> Tensor | None:
    """The inputs sorted by their groups, int32[k]; None where they are sorted, or no groups are given."""
    given = tensors.get(name)
    if given is None:
        return None
    if given.shape != (k,) or given.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"{name} is {given.dtype} {list(given.shape)}, and int32 [{k}] belongs here")
    if int(given.min()) < 0 or int(given.max()) >= groups:
        raise KernelError(f"{name} names groups from {int(given.min())} to {int(given.max())}, of {groups}")
    counts = given.long().bincount(minlength=groups)
    if k % groups or not bool((counts == k // groups).all()):
        sizes = f"{int(counts.min())} to {int(counts.max())}"
        raise KernelError(f"{name} has groups of {sizes} inputs, and groups of one size are read")
    order = given.argsort(stable=True).to(torch.int32)
    return None if torch.equal(order, torch.arange(k, dtype=torch.int32, device=order.device)) else order


def awq(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int8Rows | Int4Rows:
    """A linear layer[n, k] of AWQ. config: bits, group_size, version."""
    bits = bits_of(config, (4,))
    version, group = str(config.get("version", "gemm")).lower(), config.get("group_size", 128)
    group = k if group == -1 else group
    if type(group) is not int or group < 1 or k % group:
        raise KernelError(f"qweight: group_size {group!r} does not divide K = {k}")
    groups = k // group
    if version == "gemv":
        _whole_words(WORD // bits, K=k)
        codes = unpacked(_words(tensors, "qweight", (n, k // 8)), bits, k)
        words, scales = _words(tensors, "qzeros", (n, None)), _float(tensors, "scales", (n, None))
        if 8 * words.shape[1] < groups or scales.shape[1] < groups:
            raise KernelError(f"scales has {scales.shape[1]} groups, and {groups} belong here")
        zeros = unpacked(words, bits, 8 * words.shape[1])[:, :groups]
        return made(codes, scales[:, :groups], zeros, bits, False)
    if version != "gemm":
        raise KernelError(f"qweight: AWQ's version {version!r} is not read: gemm and gemv are")
    _whole_words(WORD // bits, N=n)
    codes = _interleaved(_words(tensors, "qweight", (k, n // 8)), n).t()
    zeros = _interleaved(_words(tensors, "qzeros", (groups, n // 8)), n).t()
    return made(codes, _float(tensors, "scales", (groups, n)).t(), zeros, bits, False)


def _interleaved(words: Tensor, n: int) -> Tensor:
    """Codes [rows, n] of AWQ's words [rows, n / 8]."""
    fields = torch.tensor(AWQ_ORDER, device=words.device)
    return unpacked(words, 4, n).view(len(words), -1, 8)[:, :, fields].reshape(len(words), n)


def packed(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int8Rows | Int4Rows:
    """A linear layer[n, k] of compressed-tensors, pack-quantized. config: bits."""
    bits = bits_of(config, (4, 8))
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [n, k]:
        raise KernelError(f"weight_shape is {shape.tolist()}, and {[n, k]} belongs here")
    fields = WORD // bits
    codes = unpacked(_words(tensors, "weight_packed", (n, -(-k // fields))), bits, k)
    if bits == 4 and k % 2:
        raise KernelError(f"weight_packed: K = {k} is odd, and rows of 4 bits in whole bytes are read")
    scales = _float(tensors, "weight_scale", (n, None))
    order = order_of(tensors, "weight_g_idx", scales.shape[1], k)
    if tensors.get("weight_zero_point") is None:
        return made(codes, scales, None, bits, True, order)
    words = _words(tensors, "weight_zero_point", (-(-n // fields), scales.shape[1]))
    return made(codes, scales, unpacked(words.t(), bits, n).t(), bits, False, order)


def rows(tensors: Tensors, config: Mapping[str, Any], n: int, k: int) -> Int8Rows | Fp8Rows | W8A8Rows:
    """A linear layer[n, k] of compressed-tensors with 8-bit activations: int-quantized, or float-quantized (e4m3).

    config: static, whether an int8 input has one scale. With 8-bit floats every token gets its own in any case.
    """
    q, scale = tensors.get("weight"), tensors.get("weight_scale")
    if q is None or scale is None:
        raise KernelError(f"{'weight' if q is None else 'weight_scale'} is missing")
    if list(q.shape) != [n, k] or q.dtype not in (torch.int8, *FP8):
        raise KernelError(f"weight is {q.dtype} {list(q.shape)}, and int8 or e4m3 {[n, k]} belongs here")
    if scale.dtype not in FLOATS or scale.numel() not in (1, n):
        raise KernelError(f"weight_scale is {scale.dtype} {list(scale.shape)}, and one float, or {n}, belong here")
    scale = scale.float().reshape(-1, 1).expand(n, 1).contiguous()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise KernelError("weight_scale is not positive everywhere")
    if q.dtype != torch.int8:
        return Fp8Rows(q, scale)
    if not config.get("static"):
        return Int8Rows(q, scale)
    zero, given = tensors.get("input_zero_point"), tensors.get("input_scale")
    if zero is not None and bool(zero.any()):
        raise KernelError("input_zero_point: asymmetric activations are not read: quantise them symmetrically")
    if given is None or given.numel() != 1:
        raise KernelError("input_scale: a static scale of the input belongs here")
    return W8A8Rows(q, scale, given.float().reshape(1))


def bits_of(config: Mapping[str, Any], known: tuple[int, ...]) -> int:
    """The bits of a weight. Raises KernelError for others than `known`."""
    bits = config.get("bits")
    if type(bits) is not int or bits not in known:
        raise KernelError(f"qweight: {bits!r} bits are not read: {' and '.join(map(str, known))} are")
    return bits


def _whole_words(fields: int, **sizes: int) -> None:
    """Raise KernelError unless each size, by its name, fills words of so many fields."""
    for name, size in sizes.items():
        if size % fields:
            raise KernelError(f"qweight: {name} = {size} is no multiple of the {fields} codes of a word")


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes [rows, count] uint8 of int32 words [rows, count bits / 32], the low field first."""
    if bits == 3:
        return int3_linear.unpack(words.contiguous().view(torch.int8))[:, :count].to(torch.uint8)
    shifts = torch.arange(0, WORD, bits, device=words.device, dtype=torch.int32)
    codes = (words.contiguous()[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)


def made(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, symmetric: bool, order: Tensor | None = None
) -> Any:
    """The canonical weight of codes[N, K] and scales, zeros[N, G]; None, as of `symmetric`: the middle of the codes.

    order: the inputs sorted by their groups; codes are in the order of inputs.
    """
    middle, scales = 1 << (bits - 1), scales.contiguous()
    groups = scales.shape[1]
    if not groups or codes.shape[1] % groups:
        raise KernelError(f"scales: {groups} groups do not divide K = {codes.shape[1]}")
    if not bool((scales.isfinite() & (scales != 0)).all()):
        raise KernelError("scales has zero, NaN or infinity")
    if zeros is not None and (symmetric or bits == 8) and bool((zeros == middle).all()):
        zeros = None
    if symmetric and zeros is not None:
        raise KernelError(f"qzeros has others than {middle}, and sym says symmetric: is it v1 or v2?")
    codes = codes if order is None else codes[:, order.long()]
    if bits == 8:
        if zeros is not None:
            raise KernelError("qzeros: 8 bits with other zero points than 128 are not read: quantise symmetrically")
        return Int8Rows((codes.to(torch.int16) - middle).to(torch.int8), scales.float(), order=order)
    half = scales.half()  # which holds most bfloat16 scales too
    offset = None if zeros is None else zeros.to(torch.int8).contiguous()
    exact = torch.equal(half.float(), scales.float())
    if bits == 3:
        return Int3Rows(int3_linear.pack(codes), half if exact else scales.float(), offset, order=order)
    return Int4Rows(int4.pack(codes), half if exact else scales.float(), offset, order=order)


def _words(tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> Tensor:
    return _checked(tensors, name, shape, (torch.int32,), "int32")


def _float(tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> Tensor:
    return _checked(tensors, name, shape, FLOATS, "a float")


def _checked(
    tensors: Tensors, name: str, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], word: str
) -> Tensor:
    found = tensors.get(name)
    if found is None:
        raise KernelError(f"{name} is missing")
    if found.dim() != 2 or any(due not in (None, size) for due, size in zip(shape, found.shape, strict=True)):
        due = ["any" if size is None else size for size in shape]
        raise KernelError(f"{name} is {list(found.shape)}, and {due} belongs here")
    if found.dtype not in dtypes:
        raise KernelError(f"{name} is {found.dtype}, and {word} belongs here")
    return found
