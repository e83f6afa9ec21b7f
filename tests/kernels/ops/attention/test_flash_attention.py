"""flash_attention by torch: its masks and their limits, who runs where, what is hidden, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN, Device, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention import sdpa as attention_sdpa
from accelpatch.kernels.ops.attention.cases import CALLS, Call, made
from accelpatch.kernels.ops.attention.flash_attention import OP, flash_attention, of_shape, spec
from accelpatch.kernels.spec import Kernel, Spec
from accelpatch.kernels.triton import launch
from tests.support.parity import DTYPES, assert_parity, name

CPU = torch.device("cpu")
WITHOUT_SDPA = ("sees-nothing", "softcap-and-sinks")
BF16 = torch.bfloat16


def arguments(call: Call, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Any, ...]:
    return made(call, torch.Generator().manual_seed(seed), dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("case", [id_ for id_ in CALLS if id_ not in WITHOUT_SDPA])
def test_torch_attention_holds_the_float_rule(case: str, dtype: torch.dtype) -> None:
    assert_parity(OP, arguments(CALLS[case], dtype), "sdpa")


def by_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: None, sums: bool, *, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """As cuDNN's operation: attention, and the logarithms of its weights' sums."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for one in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=name)
@pytest.mark.parametrize("call", [Call(2, 4, 2, 40, 130, 64), Call(1, 2, 2, 33, 34, 32)], ids=["far", "one-before"])
def test_a_long_part_is_two_calls_of_cudnn(call: Call, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over the keys before it, and a causal one over its own; here in the place of sdpa."""
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", by_sums)
    cudnn = replace(dispatch.kernel(OP).implementations["sdpa"], run=attention_sdpa.by_cudnn)
    monkeypatch.setitem(dispatch.kernel(OP).implementations, "sdpa", cudnn)
    assert_parity(OP, arguments(call, dtype), "sdpa")


@pytest.mark.parametrize(
    "sizes, due",
    [({"length": 2048, "keys": 8192}, "None"), ({"length": 2, "keys": 8192}, "None"),
     ({"length": 2048, "keys": 8192, "window": 9}, "without a mask"),
     ({"length": 2048, "keys": 8192, "causal": False}, "None"), ({"length": 2048, "keys": 2049}, "without a mask")],
    ids=["long", "short", "window", "all", "one-before"],
)  # fmt: skip
def test_which_parts_cudnn_takes(sizes: dict[str, Any], due: str) -> None:
    assert due in reason("sdpa_cudnn", KNOWN["sm_90"], **sizes)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["grouped", "continued", "window", "step"])
def test_ranges_say_the_same_as_causal_and_a_window(case: str, implementation: str) -> None:
    q, k, v, _, _, *rest = arguments(CALLS[case])
    high = torch.arange(q.shape[2], dtype=torch.int32) + 1 + k.shape[2] - q.shape[2]
    low = (high - (CALLS[case].window or k.shape[2])).clamp(min=0)
    ranges = torch.stack((low, high), -1).expand(len(q), -1, 2)
    with dispatch.forced(implementation):
        due = flash_attention(q, k, v, None, None, *rest)
        found = flash_attention(q, k, v, ranges, None, rest[0], True, 0, *rest[3:])
    torch.testing.assert_close(found, due)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["left", "right", "step", "bool"])
def test_what_no_query_sees_may_be_anything(case: str, implementation: str, value: float) -> None:
    q, k, v, ranges, bias, *rest = arguments(CALLS[case])
    hidden = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool)
    if bias is not None:
        bias[..., 7] = bias[..., -3:] = False
        hidden[:, 7] = hidden[:, -3:] = True
    elif case == "left":
        hidden[2, :18] = True
    elif case == "right":
        hidden[1, -9:] = True
    else:
        hidden[:, :20] = True
    (y,) = assert_parity(OP, (q, k, v, ranges, bias, *rest), implementation)
    for one in (k, v):
        one.transpose(1, 2)[hidden] = value
    (again,) = assert_parity(OP, (q, k, v, ranges, bias, *rest), implementation)
    torch.testing.assert_close(again, y)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_query_that_sees_nothing_gets_zeros(implementation: str) -> None:
    q, k, v, ranges, *rest = arguments(replace(CALLS["sees-nothing"], sinks=False))
    (y,) = assert_parity(OP, (q, k, v, ranges, *rest), implementation)
    empty = ranges[..., 0] >= ranges[..., 1]
    assert bool(empty.any())
    assert not bool(y[empty].any())
    assert bool((y[~empty] != 0).all())


def test_sinks_take_their_part() -> None:
    """One key with a score of 0: half of it where the sink is 0, none where the sink is large."""
    q, k, v = torch.zeros(1, 2, 1, 8), torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    y = flash_attention(q, k, v, None, None, torch.tensor([0.0, 100.0]))
    torch.testing.assert_close(y[0, 0], torch.tensor([[0.5], [0.0]]).expand(2, 8))


def test_a_window_needs_no_keys_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query with a window is a call without a mask over the last keys."""
    seen: list[tuple[Tensor, Any]] = []
    attend = attention_sdpa.functional.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        seen.append((k, mask))
        return attend(q, k, v, mask, **options)

    monkeypatch.setattr(attention_sdpa.functional, "scaled_dot_product_attention", recorded)
    q, k, v, *rest = arguments(Call(length=1, keys=90, window=16))
    with dispatch.forced("sdpa"):
        flash_attention(q, k, v, *rest)
    ((keys, mask),) = seen
    assert (keys.shape[2], mask) == (16, None)
    assert keys.data_ptr() == k[:, :, 74:].data_ptr()


def reason(implementation: str, device: Device, dtype: torch.dtype = BF16, size: int = 128, **more: Any) -> str:
    given = {"length": 512, "keys": 512} | more
    return str(dispatch.why_not(OP, implementation, of_shape(32, 8, size, dtype, **given), device))


@pytest.mark.parametrize(
    "implementation, arch, given, words",
    [
        ("sdpa", "sm_90", {"softcap": 5.0}, "no softcap"),
        ("sdpa", "sm_90", {"sinks": True}, "no sinks"),
        ("sdpa", "sm_90", {"bias": torch.float32}, "in q's dtype"),
        ("sdpa", "sm_90", {"b": 5, "length": 16384, "keys": 16384, "ranges": True}, "2.5 GiB"),
        ("sdpa_flash", "sm_90", {"ranges": True}, "no mask"),
        ("sdpa_flash", "sm_90", {"length": 7}, "no mask"),
        ("sdpa_flash", "sm_90", {"size": 257}, "up to 256"),
        ("sdpa_flash", "sm_90", {"dtype": torch.float32}, "16 bits"),
        ("sdpa_flash", "sm_75", {}, "starts at sm_80"),
        ("sdpa_flash", "gfx1100", {}, "not for gfx1100"),
        ("sdpa_flash", "cpu", {}, "on GPUs"),
        ("sdpa_flash", "sm_90", {"length": 0}, "no queries"),
        ("sdpa_cudnn", "gfx942", {}, "NVIDIA"),
        ("sdpa_cudnn", "sm_90", {"size": 136}, "up to 128"),
        ("sdpa_cudnn", "sm_90", {"size": 100}, "steps of 8"),
        ("sdpa_cudnn", "sm_90", {"keys": 1, "length": 1}, "more than one key"),
        ("sdpa_efficient", "sm_90", {"size": 36}, "multiple of 16 bytes"),
        ("sdpa_efficient", "gfx942", {"size": 512}, "up to 256"),
    ],
    ids=str,
)
def test_limits_are_said(implementation: str, arch: str, given: dict[str, Any], words: str) -> None:
    device = probe("cpu") if arch == "cpu" else KNOWN.get(arch) or replace(KNOWN["sm_80"], arch=arch)
    assert words in reason(implementation, device, **given)
    assert reason("eager", device, **given) == "None"


@pytest.mark.parametrize("version, due", [(91500, "older"), (91501, "None"), (None, "cuDNN None")], ids=str)
def test_an_old_cudnn_is_refused_where_the_gpu_is(
    version: int | None, due: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert due in reason("sdpa_cudnn", replace(KNOWN["sm_90"], index=0))
    assert reason("sdpa_cudnn", KNOWN["sm_90"]) == "None"


#: device -> who runs: plain causal, a step, with ranges, with softcap, float32
CHOSEN = {
    "sm_90": ("sdpa_cudnn", "sdpa", "triton", "triton", "sdpa"),
    "sm_80": ("sdpa", "sdpa", "sdpa", "triton", "sdpa"),
    "gfx942": ("sdpa_flash", "sdpa_flash", "triton", "triton", "sdpa"),
    "gfx1100": ("triton", "triton", "triton", "triton", "sdpa"),
    "cpu": ("sdpa", "sdpa", "sdpa", "eager", "sdpa"),
}


@pytest.mark.parametrize("arch", CHOSEN)
def test_who_runs_where(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    device = probe("cpu") if arch == "cpu" else KNOWN[arch]
    calls = ({}, {"length": 1}, {"ranges": True}, {"softcap": 30.0}, {"dtype": torch.float32})
    specs = [of_shape(32, 8, 128, **({"dtype": BF16, "length": 512, "keys": 512} | one)) for one in calls]  # type: ignore[arg-type]
    assert tuple(dispatch.choose(OP, one, device) for one in specs) == CHOSEN[arch]


@pytest.mark.parametrize(
    "given, name",
    [({"size": 256}, "sdpa"), ({"keys": 8192}, "triton"), ({"length": 2048, "keys": 8192}, "sdpa_cudnn"),
     ({"window": 100}, "triton"), ({"causal": False}, "sdpa_cudnn"), ({"length": 127, "keys": 127}, "sdpa"),
     ({"bias": torch.bool}, "sdpa")],
    ids=["wide-heads", "part", "long-part", "window", "all", "few-queries", "bias"],
)  # fmt: skip
def test_who_runs_on_hopper(given: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    sizes = {"length": 512, "keys": 512, "size": 128} | given
    assert dispatch.choose(OP, of_shape(32, 8, dtype=BF16, **sizes), KNOWN["sm_90"]) == name


def test_what_was_measured_on_this_machine_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, asked = dispatch.kernel(OP), []

    def measured(spec: Spec, device: Device) -> list[str]:
        asked.append((spec.op, device.kind))
        return ["triton", "eager"]  # the first is in no order of a CPU

    changed = Kernel(**{**vars(kernel), "measured": measured})
    monkeypatch.setattr(dispatch, "kernel", lambda op: changed)
    assert dispatch.choose(OP, of_shape(2, 1, 64, BF16), probe("cpu")) == "eager"
    assert asked == [(OP, "cpu")]


Q, K = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 5, 16)
RANGES = torch.zeros(2, 3, 2, dtype=torch.int32)
MISUSE: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtypes": ((Q, K.half(), K), "of one dtype, not k"),
    "integers": ((Q.int(), K.int(), K.int()), "float"),
    "rank": ((Q[0], K, K), r"\[B, H, L, D\]"),
    "values": ((Q, K, K[:, :, :4]), r"k and v are \[2, Hkv, S, 16\]"),
    "heads": ((Q[:, :3], K, K), "3 query heads are no multiple of 2"),
    "no-keys": ((Q[:, :, :0], K[:, :, :0], K[:, :, :0]), "no keys"),
    "too-many-queries": ((Q, K[:, :, :2], K[:, :, :2]), "give ranges"),
    "window": ((Q, K, K, None, None, None, True, -1), "window of -1"),
    "window-of-all": ((Q, K, K, None, None, None, False, 3), "and causal"),
    "softcap": ((Q, K, K, None, None, None, True, 0, -1.0), "softcap of -1.0"),
    "ranges-dtype": ((Q, K, K, RANGES.long()), "ranges is int32"),
    "ranges-shape": ((Q, K, K, RANGES[:1]), "ranges is int32"),
    "bias-shape": ((Q, K, K, None, torch.zeros(1, 1, 3, 4)), "bias is bool or float"),
    "bias-one-key": ((Q, K, K, None, torch.zeros(1, 1, 3, 1)), "bias is bool or float"),
    "bias-integers": ((Q, K, K, None, torch.zeros(1, 1, 3, 5).int()), "bias is bool or float"),
    "sinks": ((Q, K, K, None, None, torch.zeros(2)), r"sinks is float \[4\]"),
    "device": ((Q, K, K, RANGES.to("meta")), "move them"),
}


@pytest.mark.parametrize("args, message", MISUSE.values(), ids=MISUSE)
def test_misuse_says_what_came(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        flash_attention(*args)
    with pytest.raises(KernelError, match=message):
        spec(*args)
