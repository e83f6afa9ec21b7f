"""Parity cases of packed_linear and packed_embedding: those of the canonical operations, and others' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.kernels.layouts.cpu_pack import FORMS, SUPERBLOCK, Pack
from accelpatch.kernels.ops.linear import common, int3_linear, int4_linear, int8_embedding, int8_linear
from accelpatch.kernels.spec import Case


def _packed(make: Any) -> Any:
    """Convert a case of a canonical operation to a case of the packed one."""

    def packed(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        args = make(generator, dtype, device)
        if len(args) == 4:
            x, q, scale, bias = args
            return x, *Pack.pack(q, scale, bits=8).arguments(), bias
        if len(args) == 5:
            x, q, scale, offset, bias = args
            return x, *Pack.pack(q, scale, offset, bits=3).arguments(), bias
        x, q, scale, offset, codes, bias = args
        return x, *Pack.pack(q, scale, offset, bits=4, codes=codes).arguments(), bias

    return packed


def _fits(case: Case) -> bool:
    """Whether the case's group size (the part `g...` of its id) can be packed."""
    group, k = (int(part[1:]) for name in "gk" for part in case.id.split("-") if part[0] == name and part[1:].isdigit())
    if case.id.startswith("int3"):
        return group % 32 == 0
    return group % 16 == 0 or (group == k and not any(book in case.id for book in CODEBOOKS))


def cases() -> list[Case]:
    """The cases of the canonical operations that can be packed, as packs; and those of others' weights."""
    canonical = {"int8": int8_linear, "int4": int4_linear, "int3": int3_linear}
    named = [Case(f"{kind}-{case.id}", _packed(case.make)) for kind, op in canonical.items() for case in op.cases()]
    return [case for case in named if _fits(case)] + foreign_cases()


def _foreign(generator: torch.Generator, m: int, n: int, k: int, group: int, kind: str) -> tuple[Tensor, Pack, Tensor]:
    """x, a pack as others' checkpoints make one, and a bias. kind: a table's name, a form of superblocks, or
    "zero_point", whose columns are in another order."""
    x, scale, bias = common.operands(generator, torch.float32, torch.device("cpu"), m, n, k, k // group, True)
    assert bias is not None
    if kind in FORMS:
        data = torch.randint(0, 256, (n, k // SUPERBLOCK, FORMS[kind][1]), generator=generator, dtype=torch.uint8)
        halves = (torch.rand(n, k // SUPERBLOCK, 2, generator=generator) / 999).half().view(torch.uint8)
        if kind == "Q4_K":
            data[..., :4] = halves
        else:
            data[..., -2:] = halves[..., :2]
        return x, Pack.of_blocks(data.flatten(1), k, kind), bias
    q = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
    if kind != "zero_point":
        return x, Pack.pack(q, *common.of_codes(scale, kind), bits=4, codes=kind), bias
    zero = torch.randint(0, 17, scale.shape, generator=generator)
    order = torch.randperm(k, generator=generator)
    return x, Pack.pack(q, (scale / 16).half(), zero, bits=4, order=order), bias


def foreign_cases() -> list[Case]:
    """Cases of the weights of others' checkpoints."""

    def case(m: int, n: int, k: int, group: int, kind: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, pack, bias = _foreign(generator, m, n, k, group, kind)
            return x.to(dtype), *pack.arguments(), bias.to(dtype)

        return Case(f"{kind}-m{m}-n{n}-k{k}-g{group}", make)

    sizes = [(1, 65, 96), (7, 33, 320), (2, 17, 64)]
    made = [case(*size, group, "zero_point") for size, group in zip(sizes, (32, 16, 64), strict=True)]
    made += [case(*size, group, codes) for codes in CODEBOOKS for size, group in zip(sizes, (32, 64, 64), strict=True)]
    return made + [
        case(m, n, k, group, form) for form, (_, _, group) in FORMS.items() for m, n, k in ((1, 33, 256), (7, 17, 768))
    ]


def embedding_cases() -> list[Case]:
    """The cases of int8_embedding whose groups can be packed, as packs; and a table of superblocks."""

    def packed(make: Any) -> Any:
        def made(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            ids, q, scale, wanted = make(generator, dtype, device)
            return ids, wanted, *Pack.pack(q, scale, bits=8).arguments()

        return made

    def superblocks(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        _, pack, _ = _foreign(generator, 1, 33, 512, 16, "Q6_K")
        return torch.randint(0, 33, (2, 5), generator=generator), dtype, *pack.arguments()

    own = [Case(case.id, packed(case.make)) for case in int8_embedding.cases() if _fits(case)]
    return [*own, Case("Q6_K-n33-k512", superblocks)]
