"""The Triton kernel of flash_attention: the float rule on poisoned outputs; what is hidden has no influence."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.ops.attention import flash_attention as operation
from accelpatch.kernels.ops.attention.cases import CALLS, Call, made
from accelpatch.kernels.spec import Case
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, LOW, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity, name, poisoned, strided, transposed

pytestmark = needs_triton
marks = [pytest.mark.gpu, here]
OP = "flash_attention"
DTYPES = (LOW, torch.float32) if INTERPRETED else (LOW, torch.float16, torch.float32)
CASES = list(dispatch.kernel(OP).cases())
SEEDS = range(10 if INTERPRETED else 60)


def arguments(call: Call, seed: int = 1, dtype: torch.dtype = LOW) -> tuple[Any, ...]:
    return made(call, torch.Generator().manual_seed(seed), dtype, DEVICE)


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
class TestCases:
    pytestmark = marks

    def test_float_rule(self, case: Case, dtype: torch.dtype) -> None:
        assert_parity(OP, case.make(torch.Generator().manual_seed(7), dtype, DEVICE), "triton")


class TestSizes:
    pytestmark = marks

    @pytest.mark.parametrize("size", [16, 20, 64, 80, 96, 128, 256])
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
    def test_heads(self, size: int, causal: bool) -> None:
        call = Call(1, 2, 1, 35, 50, size, causal)
        assert_parity(OP, arguments(call, dtype=LOW if size > 128 else DTYPES[-1]), "triton")

    @pytest.mark.parametrize("seed", SEEDS)
    def test_random_views(self, seed: int) -> None:
        """q is a view of a qkv product, k and v of a longer cache."""
        rng = random.Random(seed)
        length, kv_heads, causal = rng.choice((1, 2, 16, 31, 33, 65, 129)), rng.randint(1, 2), rng.random() < 0.7
        call = Call(
            rng.randint(1, 2), kv_heads * rng.randint(1, 3), kv_heads, length, length + rng.choice((0, 0, 1, 47, 100)),
            rng.choice((40, 64, 80)), causal, rng.choice((0, 0, 1, 9, 40)) * causal, rng.choice((0.0, 0.0, 5.0)),
            rng.choice(("", "left", "right", "packed", "none")), rng.choice(("", "", "bool", "float")),
            rng.random() < 0.3,
        )  # fmt: skip
        q, k, v, *rest = arguments(call, seed)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        room = [one.new_full((*one.shape[:2], one.shape[2] + 9, one.shape[3]), torch.nan) for one in (k, v)]
        for cache, one in zip(room, (k, v), strict=True):
            cache[:, :, 4:-5] = one
        assert_parity(OP, (q, *(cache[:, :, 4:-5] for cache in room), *rest), "triton")

    @pytest.mark.parametrize("view", [strided, transposed], ids=["strided-offset", "transposed"])
    @pytest.mark.parametrize("case", ["left", "softcap-and-sinks", "float"])
    def test_views(self, view: Any, case: str) -> None:
        args = [view(one) if isinstance(one, Tensor) else one for one in arguments(CALLS[case])]
        assert_parity(OP, args, "triton")

    @pytest.mark.parametrize("tile", [(16, 64), (64, 32), (128, 16), (32, 128)], ids=name)
    @pytest.mark.parametrize("case", ["window", "packed", "bool", "continued"])
    def test_tiles(self, tile: tuple[int, int], case: str) -> None:
        from accelpatch.kernels.triton.flash_attention import flash_attention as run
        from accelpatch.kernels.triton.flash_tiles import Tile

        args = arguments(replace(CALLS[case], length=70, keys=90))
        with poisoned():
            y = run(*args, configuration=Tile(*tile, 4, 2))
        assert [found.reason for found in parity.check(OP, args, (y,))] == [""]

    @pytest.mark.parametrize("case", ["all", "continued", "grouped", "softcap-and-sinks"])
    def test_tiles_loaded_by_tma(self, case: str) -> None:
        from accelpatch.kernels.triton import flash_attention as kernel
        from accelpatch.kernels.triton.flash_tiles import Tile

        args, tile = arguments(replace(CALLS[case], keys=77, size=80)), Tile(64, 32, 4, 2, tma=True)
        assert kernel._descriptors(*args[1:3], tile) is not None
        with poisoned():
            y = kernel.flash_attention(*args, configuration=tile)
        assert [found.reason for found in parity.check(OP, args, (y,))] == [""]

    def test_what_tma_cannot_take_is_loaded_without(self) -> None:
        from accelpatch.kernels.triton import flash_attention as kernel
        from accelpatch.kernels.triton.flash_tiles import Tile

        q, k, v, *rest = arguments(Call(1, 2, 2, 40, 50, 20))
        tile = Tile(32, 32, 4, 2, tma=True)
        assert kernel._descriptors(k, v, tile) is None, "rows of 40 bytes"
        assert kernel._descriptors(k.expand(2, -1, -1, -1), v, tile) is None, "a stride of 0"
        y = kernel.flash_attention(q, k, v, *rest, configuration=tile)
        assert [found.reason for found in parity.check(OP, (q, k, v, *rest), (y,))] == [""]

    def test_heads_share_the_cache_in_sections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two KV heads at a time, of five: the last section is narrower."""
        from accelpatch.kernels.triton import flash_attention as kernel

        call = Call(1, 10, 5, 40, 40, 32)
        monkeypatch.setattr(kernel, "L2_BYTES", 2 * 2 * 40 * 32 * LOW.itemsize)
        assert_parity(OP, arguments(call), "triton")


class TestHidden:
    pytestmark = marks

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("case", ["left", "right", "window-of-few", "bool"])
    def test_what_no_query_sees_may_be_anything(self, case: str, value: float) -> None:
        call = Call(1, 2, 1, 5, 70, window=9) if case == "window-of-few" else CALLS[case]
        q, k, v, ranges, bias, *rest = arguments(call)
        if bias is not None:
            bias[..., 7] = bias[..., -3:] = False
        (y,) = assert_parity(OP, (q, k, v, ranges, bias, *rest), "triton")
        seen = torch.zeros(call.b, call.keys, dtype=torch.bool)
        for b in range(call.b):
            for i in range(call.length):
                low, high = (max(0, i + call.keys - call.length + 1 - (call.window or call.keys)),
                             i + call.keys - call.length + 1 if call.causal else call.keys)  # fmt: skip
                low, high = (low, high) if ranges is None else ranges[b, i].tolist()
                seen[b, low:high] = True
        shown = seen if bias is None else bias.any(2)[:, 0].cpu()
        assert not bool(shown.all())
        for one in (k, v):
            one.transpose(1, 2)[~shown.to(DEVICE)] = value
        (again,) = assert_parity(OP, (q, k, v, ranges, bias, *rest), "triton")
        assert torch.equal(y, again)

    @pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
    def test_a_query_that_sees_nothing_gets_zeros_and_disturbs_no_other(self, sinks: bool) -> None:
        q, k, v, _, _, *rest = arguments(Call(1, 2, 2, 40, 90, sinks=sinks))
        row = torch.arange(40, dtype=torch.int32)
        ranges = torch.stack((row // 2, row + 51), -1)[None]
        (due,) = assert_parity(OP, (q, k, v, ranges.to(DEVICE), None, *rest), "triton")
        for place, empty in ((3, (80, 80)), (20, (89, 2)), (39, (-5, 0)), (38, (200, 300))):
            ranges[0, place] = torch.tensor(empty, dtype=torch.int32)
        (y,) = assert_parity(OP, (q, k, v, ranges.to(DEVICE), None, *rest), "triton")
        none = torch.zeros(40, dtype=torch.bool)
        none[[3, 20, 38, 39]] = True
        assert not bool(y[:, none].any())
        torch.testing.assert_close(y[:, ~none], due[:, ~none], atol=2e-3, rtol=0.0)  # summed in another order

    def test_no_query_sees_anything(self) -> None:
        q, k, v, _, _, *rest = arguments(Call(1, 1, 1, 33, 50))
        ranges = torch.full((1, 33, 2), 40, dtype=torch.int32, device=DEVICE)
        (y,) = assert_parity(OP, (q, k.fill_(torch.nan), v.fill_(torch.nan), ranges, None, *rest), "triton")
        assert not bool(y.any())

    def test_ranges_end_with_the_keys(self) -> None:
        q, k, v, _, _, *rest = arguments(Call(1, 2, 1, 20, 30))
        ranges = torch.tensor([-7, 99], dtype=torch.int32, device=DEVICE).expand(1, 20, 2)
        assert_parity(OP, (q, k, v, ranges, None, *rest), "triton")

    def test_a_bias_of_the_least_float_hides_nothing_alone(self) -> None:
        q, k, v, _, _, *rest = arguments(Call(1, 1, 1, 20, 20), dtype=torch.float32)
        bias = torch.full((1, 1, 20, 20), torch.finfo(torch.float32).min, device=DEVICE).triu(1)
        bias[:, :, 4] = torch.finfo(torch.float32).min
        bias[:, :, 5] = float("-inf")
        (y,) = assert_parity(OP, (q, k, v, None, bias, rest[0], False, *rest[2:]), "triton")
        assert bool(y[:, 4].any())
        assert not bool(y[:, 5].any())

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_query_that_is_not_finite_is_nan_alone(self, value: float) -> None:
        q, k, v, *rest = arguments(Call(1, 2, 1, 20, 20))
        q[:, 0, 3] = value
        with dispatch.forced("triton"):
            y = operation.flash_attention(q, k, v, *rest)
        odd = ~y.isfinite().all(-1)
        assert odd.nonzero().tolist() == [[0, 3, 0]]


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def reason(arch: str = "sm_90", dtype: torch.dtype = torch.bfloat16, size: int = 64, **more: Any) -> str:
        spec = operation.of_shape(8, 2, size, dtype, **more)
        return str(operation.triton_why_not(spec, KNOWN[arch]))

    assert reason() == reason("gfx942", size=256) == "None"
    assert "up to 256" in reason(size=257)
    assert "up to 128 in torch.float32" in reason(size=129, dtype=torch.float32)
    assert "positive scaling" in reason(scaling=-1.0)
    assert "2^30 keys" in reason(keys=1 << 30)
    assert "float64" in reason(dtype=torch.float64)
    old = replace(KNOWN["sm_80"], arch="sm_75")
    assert "no bfloat16" in str(operation.triton_why_not(operation.of_shape(8, 2, 64, torch.bfloat16), old))
    assert operation.triton_why_not(operation.of_shape(8, 2, 64, torch.float16), old) is None


@pytest.mark.parametrize("length", [17, 40, 64])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100"])
def test_amd_has_one_stage_where_two_do_not_compile(arch: str, size: int, length: int) -> None:
    from accelpatch.kernels.triton import flash_tiles

    for masks in ("", "ranges"):
        tile = flash_tiles.chosen(KNOWN[arch], size, torch.bfloat16, True, length, masks)
        assert (tile.m, tile.stages) == (64, 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx950"])
def test_tiles_fit(arch: str) -> None:
    from accelpatch.kernels.triton import flash_tiles

    device = KNOWN[arch]
    for size in (64, 80, 128, 256):
        for length in (1, 17, 4096):
            for masks in ("", "ranges", "bias"):
                tile = flash_tiles.chosen(device, size, torch.bfloat16, True, length, masks)
                assert flash_tiles.fits(tile, device, size), (size, length, masks)
                assert (tile.m & (tile.m - 1), tile.n & (tile.n - 1)) == (0, 0), "Triton takes powers of 2"
