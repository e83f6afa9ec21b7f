"""Whether Stacks (layouts/expert_stack.py) are the matrices of so many experts."""

from __future__ import annotations

import torch

from accelpatch.kernels.arguments import FLOATS, say
from accelpatch.kernels.codebooks import E4M3, E8M0, FP8_CODES, NVFP4
from accelpatch.kernels.layouts import expert_tiles
from accelpatch.kernels.layouts.expert_stack import BLOCK, WORDS, Stack
from accelpatch.kernels.layouts.row_major import FP8_BLOCK

CODES = (torch.int8, torch.int32, E4M3)


def why_not_stack(stack: Stack, n: int, k: int, experts: int, device: torch.device) -> str | None:
    """Why a Stack is none of `experts` matrices [n, k]; None where it is."""
    w, scale, offset, _ = stack
    if stack.tiled:
        return _why_not_tiles(stack, n, k, experts, device)
    columns = -(-k // BLOCK) * WORDS if stack.bits == 4 else k
    if list(w.shape) != [experts, n, columns] or not (w.dtype in FLOATS or w.dtype in CODES):
        return f"a weight is {say(w)}, and [{experts}, {n}, {columns}] belongs here"
    if (scale is None) == (stack.bits in (4, 8)):
        return "codes have scales, and floats have none"
    if scale is not None and (list(scale.shape[:2]) != [experts, n] or scale.shape[2] < 1 or k % scale.shape[2]):
        return f"a scale is {say(scale)}, and [{experts}, {n}, G] belongs here, G dividing {k}"
    if stack.codes == NVFP4 and (offset is None or list(offset.shape) != [experts, n, 1]):
        found = "missing" if offset is None else say(offset)
        return f"NVFP4 has factors of rows [{experts}, {n}, 1], and they are {found}"
    if stack.codes == FP8_CODES and (scale is None or k != scale.shape[2] * FP8_BLOCK):
        return f"e4m3 has a scale for each {FP8_BLOCK} values of a row, and K is {k}"
    of_rows = stack.codes == NVFP4
    if offset is not None and not of_rows and (scale is None or stack.bits != 4 or offset.shape != scale.shape):
        return f"an offset is {say(offset)}, which belongs to 4-bit codes and has the shape of their scale"
    return _why_not_bias(stack, n, experts, device)


def _why_not_bias(stack: Stack, n: int, experts: int, device: torch.device) -> str | None:
    bias = stack.bias
    if stack.codes == "e2m1" and (stack.bits != 4 or stack.offset is not None):
        return f"scales of {E8M0} belong to 4-bit codes without an offset"
    if bias is not None and (list(bias.shape) != [experts, n] or not bias.is_floating_point()):
        return f"a bias is {say(bias)}, and float [{experts}, {n}] belongs here"
    apart = next((one for one in stack if one is not None and one.device != device), None)
    return None if apart is None else f"x lies on {device}, a weight on {apart.device}: move the module"


def _why_not_tiles(stack: Stack, n: int, k: int, experts: int, device: torch.device) -> str | None:
    w, scale, offset, _ = stack
    if scale is None or scale.dim() != 6 or stack.groups < 1 or k % stack.groups:
        return f"tiles have a scale [E, tiles, sets, 8, groups, 2], not {'none' if scale is None else say(scale)}"
    if reason := expert_tiles.unfit(n, k, k // stack.groups, None if stack.codes else torch.float16, stack.codes):
        return reason
    size, table = expert_tiles.shapes(experts, n, k, stack.groups)
    if w.dtype != torch.int8 or list(w.shape) != size:
        return f"the tiles of [{experts}, {n}, {k}] are int8 {size}, not {say(w)}"
    for one in (scale, scale if offset is None else offset):
        if list(one.shape) != table or one.dtype != scale.dtype:
            return f"scales and offsets are {table} of one dtype, not {say(one)}"
    return _why_not_bias(stack, n, experts, device)
