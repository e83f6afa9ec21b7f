"""What attention of a decode step refuses: layers that no kernel takes, arguments that do not fit together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.ops.attention import decode_attention
from tests.support.interpreted import DEVICE


def test_reasons() -> None:
    shape = AttentionShape(4, 2, 64, 0.125, torch.ones(32))
    assert decode_attention.why_not(shape, torch.float32, KNOWN["sm_90"]) in (None, "Triton is not installed")
    odd = AttentionShape(4, 3, 63, 0.125, torch.ones(32))
    assert "63" in str(decode_attention.why_not(odd, torch.float32, KNOWN["sm_90"]))
    assert shape.columns == 512
    wide = AttentionShape(4, 2, 64, 0.125, torch.ones(33))
    large = AttentionShape(4, 2, 256, 0.125, torch.ones(128))
    assert "float32" in str(decode_attention.why_not(large, torch.float32, KNOWN["sm_90"]))
    assert "66 columns" in str(decode_attention.why_not(wide, torch.float32, KNOWN["sm_90"]))


def test_more_tokens_than_a_step_has() -> None:
    args, shape = made(Step(tokens=9), torch.float32, DEVICE)
    with pytest.raises(KernelError, match="1 to 8 tokens"):
        decode_attention.decode_attention_(*args, shape)
    (qkv, *rest), shape = made(Step(tokens=2), torch.float32, DEVICE)
    with pytest.raises(KernelError, match="qkv holds"):
        decode_attention.decode_attention_(qkv[:3], *rest, shape)


@pytest.mark.parametrize(
    "arch, widest",
    [("sm_80", 128), ("sm_89", 64), ("sm_90", 256), ("sm_120", 64), ("gfx90a", 128), ("gfx942", 128), ("gfx950", 128)],
)
def test_heads_that_the_library_takes(arch: str, widest: int) -> None:
    def reason(size: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
        return attention.why_not(AttentionShape(8, 2, size, 0.125, torch.ones(size // 2)), dtype, KNOWN[arch])

    assert reason(widest) is None
    assert f"8 to {widest} columns" in str(reason(widest + 8))
    assert "a multiple of 8" in str(reason(36))
    assert "float32" in str(reason(64, torch.float32))


@pytest.mark.parametrize(
    "place, change, words",
    [
        (1, lambda positions: positions.int(), "int64"),
        (3, lambda mask: mask.bool(), "int64"),
        (3, lambda mask: mask[:, 1:], "mask"),
        (4, lambda keys: keys[:, :, :100].contiguous(), "are not of"),
        (5, lambda values: values.half(), "one dtype"),
        (0, lambda qkv: torch.cat([qkv, qkv], 1)[:, : qkv.shape[1]], "contiguous"),
        (4, lambda keys: keys.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    ],
    ids=["positions", "mask-dtype", "mask-shape", "keys-shape", "values-dtype", "qkv-strided", "keys-strided"],
)
def test_arguments_that_do_not_fit(place: int, change: object, words: str) -> None:
    args, shape = made(Step(), torch.float32, DEVICE)
    assert callable(change)
    wrong: list[Tensor] = [change(one) if at == place else one for at, one in enumerate(args)]
    with pytest.raises(KernelError, match=words):
        decode_attention.decode_attention_(*wrong, shape)


def test_zeros_are_shared_and_stay_where_they_are() -> None:
    zeros, here = Zeros(), torch.device("cpu")
    some = zeros.first(8, here)
    assert zeros.first(3, here).data_ptr() == some.data_ptr()
    more = zeros.first(100, here)
    assert more.data_ptr() != some.data_ptr()
    assert zeros.first(8, here).data_ptr() == more.data_ptr()
    assert [len(one) for one in zeros.buffers] == [8, 100]  # captured launches may know the first ones
    assert not more.any()
