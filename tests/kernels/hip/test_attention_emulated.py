"""The device library's attention without a device: NVIDIA's and AMD's forms compiled for the CPU by the SIMT emulator.

Their own instructions are replaced by simt_emulator/nvidia.h and simt_emulator/amd.h; all else is the kernels' source.
It shows what lanes exchange, where their data lies and in which order they add: nothing about speed, nor about a GPU's
memory.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.hip.binding import Signal
from tests.kernels.hip.simt_emulator import ATTENTION, COMPILER, brought_by, compiled
from tests.kernels.ops.attention.test_decode_attention import CASES, SAME, assert_float_rule, assert_the_same_bits
from tests.support.interpreted import DEVICE
from tests.support.parity import bits
from tests.support.spread import spread

pytestmark = [
    pytest.mark.each_value,
    pytest.mark.slow,  # its compilations
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="its tensors lie on the CPU"),
]
WIDEST = {"nvidia": 256, "ampere": 256, "gfx942": 128}
LONG = {
    "four-queries": Step(size=128, slot=900, capacity=1024, heads=4, kv_heads=1, rows=1),
    "eight-of-rows": Step(size=128, slot=700, capacity=768, padding=300, tokens=8),
    "ten-spans": Step(size=128, slot=2300, capacity=2400, rows=1, heads=2),
    "five-nodes": Step(size=64, slot=8600, capacity=8700, rows=1, heads=2, kv_heads=1, padding=100),
    "into-the-fifth-node": Step(size=64, slot=8188, capacity=8200, rows=1, heads=2, kv_heads=1, tokens=8),
    "two-bunches": Step(size=64, slot=16700, capacity=16800, rows=1, heads=2, kv_heads=1),
    "window-over-spans": Step(size=128, slot=751, capacity=768, heads=4, tokens=8, window=500),
    "wide-spans": Step(size=256, slot=600, capacity=768, heads=4, rows=1, tokens=3),
    "narrow-spans": Step(size=64, slot=600, capacity=768, heads=4, rows=1),
    "rows-of-own-heads": Step(size=128, slot=700, capacity=768, heads=2, kv_heads=2, rows=5, padding=300),
    "hidden-slots": Step(size=128, slot=900, capacity=960, heads=2, kv_heads=2, padding=300, hidden=7),
    "narrow-hidden-slots": Step(size=64, slot=900, capacity=960, heads=2, kv_heads=2, rows=1, hidden=11),
    "hidden-slots-in-a-window": Step(size=64, slot=751, capacity=768, tokens=3, window=500, hidden=5),
    "rows-of-long-heads": Step(size=64, slot=8600, capacity=8700, rows=3, heads=2, kv_heads=2, padding=2100),
    "rows-of-two-bunches": Step(size=64, slot=16500, capacity=16600, rows=3, heads=1, kv_heads=1, padding=100),
    "a-row-that-ends-early": Step(size=64, slot=2900, capacity=3000, heads=2, kv_heads=1, tokens=7, padding=2000),
    "claimed-spans": Step(size=128, slot=9100, capacity=9216, rows=2, heads=1, kv_heads=1, padding=4000),
    "claimed-shared-heads": Step(size=128, slot=9100, capacity=9216, rows=3, heads=4, padding=6000, kv_heads=1),
    "rows-of-many-lengths": Step(size=64, slot=1300, capacity=1400, rows=5, heads=2, kv_heads=2, apart=320),
    "claimed-many-lengths": Step(size=128, slot=9100, capacity=9216, rows=3, heads=1, kv_heads=1, apart=3300),
    "rows-of-shared-heads": Step(size=64, slot=530, capacity=768, heads=6, kv_heads=2, rows=8),
}
WINDOWS = {  # whose first span is not the first of a node
    "of-three-spans": Step(size=64, slot=1500, capacity=1536, rows=1, heads=2, kv_heads=2, window=700),
    "of-four-nodes": Step(size=128, slot=8000, capacity=8192, rows=1, heads=1, kv_heads=1, window=7300),
    "of-heads-of-two-blocks": Step(
        size=64, slot=4100, capacity=4200, rows=5, heads=2, kv_heads=2, window=2900, padding=700
    ),
    "of-rows": Step(size=72, slot=2600, capacity=2688, rows=2, heads=4, kv_heads=2, window=1600, padding=300, tokens=3),
}
# Bytes of shared memory that a block may take, if a product is to find room beside it.
HALF = 233472 // 2 - 1024
PIECE = 4096  # bytes of what follows that are brought at once
BESIDE_PRODUCTS = {
    "own-heads": Step(size=128, heads=2, kv_heads=2, rows=1),
    "four-queries": Step(size=128, heads=4, kv_heads=1, rows=1),
    "seven-queries": Step(size=128, heads=7, kv_heads=1, rows=8),
    "eight-queries": Step(size=128, heads=8, kv_heads=1, rows=1),
    "six-tokens": Step(size=128, heads=1, kv_heads=1, rows=1, tokens=6),
    "eight-tokens": Step(size=128, heads=1, kv_heads=1, rows=1, tokens=8),
    "eight-tokens-of-narrow-heads": Step(size=64, heads=1, kv_heads=1, rows=1, tokens=8),
    "eight-tokens-of-shared-heads": Step(size=96, heads=4, kv_heads=1, rows=2, tokens=8),
}
BLOCKS = {  # of 8 processors, alone and where a product follows
    "few-heads": (Step(rows=1, heads=1, kv_heads=1, slot=3000, capacity=3100), 8, 8),
    "divided-heads": (Step(rows=2, heads=2, kv_heads=2, slot=900, capacity=1024), 16, 8),
    "divided-heads-of-a-short-cache": (Step(rows=2, heads=2, kv_heads=2, slot=300, capacity=512), 8, 8),
    "a-head-for-a-block": (Step(rows=8, heads=1, kv_heads=1), 8, 8),
    "heads-for-nearly-all": (Step(rows=7, heads=2, kv_heads=2), 16, 8),
    "more-rows-than-a-product-takes": (Step(rows=9, heads=2, kv_heads=2), 16, 16),
}
ORDERS = {"at-once-backwards": (0, 1), "late": (1, 0)}


@pytest.fixture(scope="module", params=WIDEST)
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def library(vendor: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    held = compiled(vendor, ATTENTION, "attention", tmp_path_factory)
    held.set_beside(1)
    held.overlaps = vendor != "gfx942"  # whether a kernel may begin before the one before it has ended
    return held


def _op(library: ctypes.CDLL, late: float = 0.0, following: Tensor | None = None) -> Callable[..., Tensor]:
    """late: the share of what is signalled that is not there when first read; following: what comes behind reads."""

    def decode_attention_(*args: Tensor | AttentionShape) -> Tensor:
        qkv, positions, slot, mask, keys, values, shape = args
        y = torch.full((*qkv.shape[:-1], shape.heads * shape.size), float("nan"), dtype=qkv.dtype)
        columns = (shape.heads + shape.kv_heads) * shape.size
        signal = Signal(torch.tensor([columns, 0], dtype=torch.int32), columns, qkv)
        if late:
            full, qkv = qkv, qkv.clone()
            qkv.view(torch.int16)[..., torch.randperm(columns)[: int(late * columns)]] = binding.SENTINEL
            library.owe(ctypes.c_void_p(qkv.data_ptr()), ctypes.c_void_p(full.data_ptr()), ctypes.c_int64(qkv.nbytes))
        with binding.weight_prefetch():
            given = attention.arguments(qkv, y, positions, slot, mask, keys, values, shape, following, signal)
        status = library.accelpatch_decode_attention(
            ctypes.byref(given), binding.DTYPES.index(qkv.dtype), ctypes.c_void_p()
        )
        assert status == 0
        assert not library.still_owed()
        assert not any(one.any() for one in shape.memory.buffers)
        counted = library.overlaps and positions.numel() <= 8  # of more tokens nothing is signalled
        assert signal.number.tolist() == [0 if counted else columns, 0]
        return y

    return decode_attention_


def _fits(vendor: str, case: Step) -> None:
    if case.size > WIDEST[vendor]:
        pytest.skip(f"{vendor}: heads of up to {WIDEST[vendor]} columns")
    if vendor == "ampere" and case.size != 128:
        pytest.skip("as for Hopper but for where copies begin, whatever the size")


@spread("case, order", CASES | LONG, ORDERS)
def test_float_rule(case: Step, order: tuple[int, int], vendor: str, library: ctypes.CDLL) -> None:
    _fits(vendor, case)
    library.set_emulator(5, *order)
    assert_float_rule(_op(library), case, torch.float16 if order[0] else torch.bfloat16)


@spread("case, processors", SAME | LONG, [1, 8])
def test_a_token_gets_the_bits_that_it_gets_alone(
    case: Step, processors: int, vendor: str, library: ctypes.CDLL
) -> None:
    _fits(vendor, case)
    library.set_emulator(processors, 1, 0)
    assert_the_same_bits(_op(library), case, torch.bfloat16)


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_the_bits_do_not_depend_on_which_block_has_what(case: Step, vendor: str, library: ctypes.CDLL) -> None:
    _fits(vendor, case)
    args, shape = made(case, torch.bfloat16, DEVICE)
    found = []
    for processors in (1, 3, 7, 8):
        library.set_emulator(processors, processors % 2, processors % 3 == 0)
        found.append(_op(library)(*args, shape))
    assert all(torch.equal(bits(one), bits(found[0])) for one in found)


@pytest.mark.parametrize("case", WINDOWS.values(), ids=WINDOWS)
def test_what_blocks_hand_each_other_may_be_late(case: Step, vendor: str, library: ctypes.CDLL) -> None:
    _fits(vendor, case)
    args, shape = made(case, torch.bfloat16, DEVICE)
    library.set_emulator(1, 0, 0)
    due = bits(_op(library)(*args, shape))
    for trial in range(12 if library.overlaps else 2):
        library.set_emulator((5, 7, 8)[trial % 3], 0, 0)
        library.set_delay((16, 60)[trial % 2], trial)
        found = _op(library)(*args, shape)
        library.set_delay(0, 0)
        assert torch.equal(bits(found), due), trial


@pytest.mark.parametrize("name", ["four-queries", "ten-spans", "narrow-spans"])
def test_what_is_signalled_may_come_later_than_its_count(name: str, vendor: str, library: ctypes.CDLL) -> None:
    if not library.overlaps:
        pytest.skip("nothing is signalled")
    args, shape = made(LONG[name], torch.bfloat16, DEVICE)
    library.set_emulator(5, 0, 0)
    assert torch.equal(bits(_op(library, late=0.1)(*args, shape)), bits(_op(library)(*args, shape)))


@pytest.mark.parametrize("case", BESIDE_PRODUCTS.values(), ids=BESIDE_PRODUCTS)
def test_a_launch_leaves_room_for_a_product(case: Step, vendor: str, library: ctypes.CDLL) -> None:
    if vendor != "nvidia":
        pytest.skip("kernels do not overlap")
    args, shape = made(case, torch.bfloat16, DEVICE)
    library.set_emulator(2, 0, 0)
    _op(library)(*args, shape)
    assert library.shared_of_last_launch() <= HALF


def test_blocks_of_many_spans_have_the_shallow_ring(vendor: str, library: ctypes.CDLL) -> None:
    """From eight spans of a full cache a processor on: here two heads on two processors."""
    if vendor != "nvidia":
        pytest.skip("no ring")
    library.set_emulator(2, 0, 0)
    taken = {}
    for spans in (7, 8):
        case = Step(size=128, heads=2, kv_heads=2, rows=1, slot=300, capacity=spans * attention.KV_SPLIT)
        args, shape = made(case, torch.bfloat16, DEVICE)
        _op(library)(*args, shape)
        taken[spans] = library.shared_of_last_launch()
    assert taken[7] - taken[8] == 8 * 16 * 128 * 2  # a tile of each wave


@pytest.mark.parametrize("case, alone, followed", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_a_launch(case: Step, alone: int, followed: int, vendor: str, library: ctypes.CDLL) -> None:
    if vendor != "nvidia":
        pytest.skip("a block a processor")
    args, shape = made(case, torch.bfloat16, DEVICE)
    library.set_emulator(8, 0, 0)
    for following, blocks in ((None, alone), (torch.zeros(64), followed)):
        _op(library, following=following)(*args, shape)
        assert library.blocks_of_last_launch() == blocks


def test_a_divided_head_is_handed_from_block_to_block(vendor: str, library: ctypes.CDLL) -> None:
    """Nine heads of three spans on eight blocks: five are divided, and what the first of two has of one is a record."""
    if not library.overlaps:
        pytest.skip("blocks do not wait")
    args, shape = made(Step(size=128, rows=3, heads=3, kv_heads=3, slot=700, capacity=768), torch.bfloat16, DEVICE)
    library.set_emulator(8, 0, 0)
    library.take_handed()
    _op(library, following=torch.zeros(64))(*args, shape)
    record = 128 // 4 + 128 // 16
    assert library.take_handed() == 5 * 2 * record  # written, and taken back


@pytest.mark.parametrize("slot, records", [(9215, 2 * 7), (100, 0)])
def test_blocks_claim_spans_of_long_heads(slot: int, records: int, vendor: str, library: ctypes.CDLL) -> None:
    """Two heads of 36 spans on three blocks: of each one block has two nodes, and five halves of nodes are claimed."""
    if not library.overlaps:
        pytest.skip("blocks do not wait")
    case = Step(size=128, rows=2, heads=1, kv_heads=1, slot=slot, capacity=9216)
    args, shape = made(case, torch.bfloat16, DEVICE)
    library.set_emulator(3, 0, 0)
    library.take_handed()
    _op(library)(*args, shape)
    assert library.take_handed() == records * 2 * (128 // 4 + 128 // 16)  # written, and taken back


@pytest.mark.parametrize("pieces, brought", [(3, 3), (100, 24)])
def test_blocks_without_work_bring_what_follows(pieces: int, brought: int, vendor: str, library: ctypes.CDLL) -> None:
    if vendor != "nvidia":
        pytest.skip("kernels do not overlap")
    args, shape = made(Step(rows=1, heads=2, kv_heads=2, slot=100, capacity=256), torch.bfloat16, DEVICE)
    library.set_emulator(8, 0, 0)
    following = torch.zeros(pieces * PIECE + 100, dtype=torch.uint8)
    brought_by(library)
    _op(library, following=following)(*args, shape)
    assert brought_by(library) == [(following.data_ptr() + i * PIECE, PIECE) for i in range(brought)]


@pytest.mark.parametrize(
    "case, blocks, ring",  # ring: the first slot of values that it has no room for
    [
        (Step(size=128, rows=1, heads=1, kv_heads=1, slot=600, capacity=700), 1, 128),
        (Step(size=120, rows=1, heads=2, kv_heads=1, slot=600, capacity=700), 1, None),  # a kernel for all that is rare
        (Step(size=128, rows=1, heads=4, kv_heads=2, slot=600, capacity=700), 2, 0),
        (Step(size=64, rows=1, heads=2, kv_heads=2, slot=600, capacity=700), 2, 256),
        (Step(size=64, rows=1, heads=2, kv_heads=2, slot=500, capacity=700), 2, None),  # the ring has all but half
        (Step(size=128, rows=1, heads=1, kv_heads=1, slot=600, capacity=700), 3, None),  # a span each
    ],
)
def test_blocks_bring_what_their_ring_has_no_room_for(
    case: Step, blocks: int, ring: int | None, vendor: str, library: ctypes.CDLL
) -> None:
    """128 slots, a tile of 16 by each wave."""
    if vendor != "nvidia":
        pytest.skip("kernels do not overlap")
    args, shape = made(case, torch.bfloat16, DEVICE)
    library.set_emulator(blocks, 0, 0)
    brought_by(library)
    _op(library)(*args, shape)
    slots = () if ring is None else range(ring, ring + 128, 16)
    heads = args[-1][0]
    assert brought_by(library) == [(values[slot].data_ptr(), 16 * case.size * 2) for values in heads for slot in slots]


def test_random_steps(vendor: str, library: ctypes.CDLL) -> None:
    draw = random.Random(5)
    for trial in range(20):
        library.set_emulator(draw.choice([1, 3, 8]), draw.randint(0, 1), draw.randint(0, 1))
        kv_heads, tokens, slot = draw.choice([1, 2]), draw.randint(1, 8), draw.randint(0, draw.choice([40, 300, 900]))
        case = Step(
            heads=kv_heads * draw.choice([1, 2, 4, 7]), kv_heads=kv_heads, size=draw.choice([64, 80, 96, 128]),
            slot=slot, capacity=slot + tokens + 9 * trial, rows=1 + trial % 2, tokens=tokens, apart=70 * (trial % 3),
            padding=draw.randint(0, slot), window=draw.choice([0, 0, 5, 100, 400]), norms=draw.random() < 0.3,
        )  # fmt: skip
        try:
            assert_the_same_bits(_op(library), case, torch.bfloat16)
        except AssertionError as error:
            raise AssertionError((trial, case)) from error
