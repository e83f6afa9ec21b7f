"""Checks decode_attention against its float64 reference, for the self-test: odd sizes, padding, windows, several
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.ops.attention.decode_attention import by_triton, reference_, why_no_triton

OP = "decode_attention"


@dataclass(frozen=True)
class Step:
    """One call: rows of `tokens` new tokens after `slot` cached ones, in a cache of `capacity` slots.

    padding: left padding of the last row, in slots. hidden: every hidden-th cached slot is masked; 0 for none.
    rotary_dim: columns of a head with rotary embedding applied; 0 for all. window, softcap: 0 for none. apart: how many
    fewer slots each row has cached than the one after it. sinks: whether heads have scores without a key.
    """

    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    slot: int = 70
    capacity: int = 256
    tokens: int = 1
    rows: int = 2
    padding: int = 0
    window: int = 0
    norms: bool = False
    rotary_dim: int = 0
    softcap: float = 0.0
    plus_one: bool = False
    hidden: int = 0
    apart: int = 0
    sinks: bool = False

    @property
    def slots(self) -> list[int]:
        """How many slots each row has cached."""
        return [max(0, self.slot - self.apart * behind) for behind in reversed(range(self.rows))]


STEPS: Mapping[str, Step] = {
    "first-token": Step(4, 4, 64, 0, 6),
    "grouped": Step(12, 4, 128, 300, 306, padding=17),
    "seven-to-one": Step(7, 1, 96, 77, 90, tokens=8, norms=True),
    "odd-size": Step(2, 2, 80, 255, 263, tokens=3, rows=3),
    "wide-heads": Step(4, 2, 256, 511, 517, window=100),
    "long": Step(8, 8, 128, 1500, 1507, tokens=2, padding=700, rows=5),
    "rows-of-many-lengths": Step(4, 2, 64, 700, 710, padding=20, rows=4, apart=250),
    "sinks": Step(8, 2, 64, 700, 707, tokens=2, padding=600, window=128, sinks=True),
}


IMPLEMENTATIONS: Mapping[str, Callable[..., Tensor]] = {"hip": attention.decode_attention_, "triton": by_triton}


def why_not(name: str, shape: AttentionShape, dtype: torch.dtype, device: Device) -> str | None:
    """Why an implementation cannot run here; None where it can."""
    return (attention.why_not if name == "hip" else why_no_triton)(shape, dtype, device)


def made(
    step: Step, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[tuple[Tensor, ...], AttentionShape]:
    """Random arguments of a call, and the layer's AttentionShape.

    Slots that are empty, masked or outside every token's window hold NaN, so that reading them shows.
    """
    draw = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw).to(device, dtype)

    q_norm, k_norm = (random(step.size) * 0.3 + 1 if step.norms else None for _ in range(2))
    sinks = (torch.randn(step.heads, generator=draw) * 2).to(device) if step.sinks else None
    rotary_dim = step.rotary_dim or step.size
    inv_freq = (10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)).to(device)
    shape = AttentionShape(
        step.heads, step.kv_heads, step.size, step.size**-0.5, inv_freq, 1.0, step.window, q_norm, k_norm, 1e-6,
        step.softcap, step.plus_one, sinks,
    )  # fmt: skip
    cache = [random(step.rows, step.kv_heads, step.capacity, step.size) for _ in range(2)]
    mask = torch.ones(step.rows, step.capacity, dtype=torch.int64, device=device)
    mask[-1, : step.padding] = 0
    if step.hidden:
        mask[:, step.hidden - 1 :: step.hidden] = 0
    slots = torch.tensor(step.slots, device=device)
    for row, slot in enumerate(step.slots):
        mask[row, slot::2] = 0  # the mask of the new tokens' slots must not matter
        for one in cache:
            one[row, :, slot:] = float("nan")
            one[row].masked_fill_((mask[row] == 0)[None, :, None], float("nan"))
            if step.window:
                one[row, :, : max(0, slot + 1 - step.window)] = float("nan")
    positions = slots[:, None] + torch.arange(step.tokens, device=device)
    positions[-1] -= step.padding
    qkv = random(step.rows * step.tokens, shape.columns)
    return (qkv, positions, slots, mask, *cache), shape


def deviation(name: str, args: tuple[Tensor, ...], shape: AttentionShape) -> tuple[float, float]:
    """(largest error of an implementation, allowed error): twice that of torch in the same dtype, plus an ulp."""
    wide = (one.double() if one.is_floating_point() else one for one in args)
    norms = {part: one.double() for part in ("q_norm", "k_norm") if (one := getattr(shape, part)) is not None}
    plainly: Callable[..., Tensor] = reference_
    exact = plainly(*wide, replace(shape, **norms))
    found = [run(*(one.clone() for one in args), shape) for run in (plainly, IMPLEMENTATIONS[name])]
    plain, mine = ((one.double() - exact).abs().max().item() for one in found)
    bound = 2 * plain + torch.finfo(args[0].dtype).eps * exact.abs().max().item()
    return (mine if mine == mine else float("inf")), bound
