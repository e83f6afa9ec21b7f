"""Random damage to tensors of checkpoints that others' tools wrote: read, or refused by the tensor's name."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accelpatch.checkpoints import foreign
from accelpatch.errors import KernelError
from tests.support.foreign import K_PROJ, READ, ROOT, expected


def mutated(rng: random.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor with other bytes, shape or dtype, or left out, or another's name."""
    name = rng.choice(list(tensors))
    found, one = dict(tensors), tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        data = one.clone().flatten().view(torch.uint8)
        for _ in range(rng.randint(1, 64)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        found[name] = data.view(one.dtype).view(one.shape)
    elif kind == 1:
        found[name] = one.flatten()[: rng.randint(0, one.numel())].clone()
    elif kind == 2:
        found[name] = one.to(rng.choice((torch.int32, torch.int8, torch.float16, torch.float64, torch.bool)))
    elif kind == 3:
        del found[name]
    elif kind == 4:
        found[name] = one.reshape(-1, 1) if rng.random() < 0.5 else one.unsqueeze(0)
    else:
        found[name] = found[rng.choice(list(tensors))]
    return found


def check_mutations(count: int) -> None:
    rng = random.Random(1)
    folders = [name for name in READ if not name.startswith("awq-gemm-4bit-g32-")]
    held = {name: load_file(ROOT / name / "model.safetensors") for name in folders}
    for _ in range(count):
        name = rng.choice(folders)
        layout = foreign.layout_of(str(ROOT / name))
        assert layout is not None
        reader = foreign.packed(layout)
        assert reader is not None
        tensors = {part: held[name][key] for part in reader.parts if (key := f"{K_PROJ}.{part}") in held[name]}
        n, k = expected(name)[f"{K_PROJ}.weight"].shape
        if rng.random() < 0.2:
            layout = {
                **layout,
                rng.choice(("bits", "group_size", "version")): rng.choice((0, -1, 5, 7, 10**9, None, "x")),
            }
        said = ""
        try:
            assert reader.weight(mutated(rng, tensors), layout, n, k).n == n
        except KernelError as error:
            said = str(error)
        assert not said or any(part in said for part in (*reader.parts, "scales", "qweight", "qzeros")), said


def test_300_mutations_are_read_or_refused() -> None:
    check_mutations(300)


@pytest.mark.nightly
def test_10_000_mutations_are_read_or_refused() -> None:
    check_mutations(10_000)
