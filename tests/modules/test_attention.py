"""Attention's function and mask as transformers calls them: beside its own, for every kind of mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    chunked_causal_mask_function,
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
)

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.modules import attention
from accelpatch.modules import attention_mask as masks
from accelpatch.modules.attention import attention_forward, attention_mask
from accelpatch.modules.attention_settings import NAME, SETTING
from tests.support.tiny import CAUSAL

CAUSAL_MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=2)
BATCH, PAST = 2, 6
LEFT = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
HOLE = torch.tensor([[1] * 9, [1, 1, 0, 0, 1, 1, 1, 1, 1]])


def config(implementation: str) -> Any:
    attention.register()
    made = AutoConfig.for_model("mistral", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                num_hidden_layers=1, sliding_window=4, attention_chunk_size=4)  # fmt: skip
    vars(made)[SETTING] = implementation
    return made


def qkv(length: int, keys: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((BATCH, 4, length, 16), (BATCH, 2, keys, 16), (BATCH, 2, keys, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


KINDS: dict[str, Any] = {
    "causal": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunked": create_chunked_causal_mask,
    "both ways": create_bidirectional_mask,
}
MASKS = {"none": None, "ones": torch.ones_like(LEFT), "left": LEFT, "right": RIGHT, "hole": HOLE}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_mask_is_that_of_sdpa(kind: str, mask: Tensor | None) -> None:
    x = torch.zeros(BATCH, 9, 64)
    made = []
    for name in (NAME, "sdpa"):
        more = () if kind == "both ways" else (None, None)
        made.append(KINDS[kind](config(name), x, mask, *more))
    module: Any = SimpleNamespace(is_causal=kind != "both ways", num_key_value_groups=2)
    args = qkv(9, 9)
    mine, _ = attention_forward(module, *args, made[0], scaling=0.3)
    due, _ = sdpa_attention_forward(module, *args, made[1], scaling=0.3)
    shown = torch.ones(BATCH, 9, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(mine[shown], due[shown], rtol=1e-5, atol=1e-6)
    assert bool(mine.isfinite().all())
    if made[0] is not None and made[0].dtype == torch.int32:
        assert made[0].numel() <= BATCH * 9 * 2  # and not the 9 keys of each


@pytest.mark.parametrize("kind", ["causal", "window", "chunked"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
def test_prompts_that_continue_a_cache(kind: str, length: int, static: bool, padded: bool) -> None:
    keys = torch.randn(BATCH, 2, PAST, 16, generator=torch.Generator().manual_seed(1))
    made, held = [], []
    for name in (NAME, "sdpa"):
        cache: Any = StaticCache(config(name), max_cache_len=16) if static else DynamicCache(config=config(name))
        cache.update(keys, keys + 1, 0)
        mask = LEFT[:, : PAST + length] if padded else None
        made.append(KINDS[kind](config(name), torch.zeros(BATCH, length, 64), mask, cache, None))
        _, k, v = qkv(length, length)
        held.append(cache.update(k, v, 0))
    q = qkv(length, length)[0]
    mine, _ = attention_forward(CAUSAL_MODULE, q, *held[0], made[0], scaling=0.3)  # type: ignore[arg-type]
    due, _ = sdpa_attention_forward(CAUSAL_MODULE, q, *held[1], made[1], scaling=0.3)
    torch.testing.assert_close(mine, due, rtol=1e-5, atol=1e-6)


def test_packed_sequences_do_not_see_each_other() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]).expand(BATCH, -1)
    mask = create_causal_mask(config(NAME), torch.zeros(BATCH, 9, 64), None, None, positions)
    q, k, v = qkv(9, 9)
    whole, _ = attention_forward(CAUSAL_MODULE, q, k, v, mask)  # type: ignore[arg-type]
    for part in (slice(0, 4), slice(4, 7), slice(7, 9)):
        alone, _ = attention_forward(CAUSAL_MODULE, q[:, :, part], k[:, :, part], v[:, :, part], None)  # type: ignore[arg-type]
        torch.testing.assert_close(whole[:, part], alone, rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_nothing_is_zero_and_what_is_hidden_does_not_leak() -> None:
    mask = create_causal_mask(config(NAME), torch.zeros(BATCH, 9, 64), LEFT, None, None)
    q, k, v = qkv(9, 9)
    due, _ = attention_forward(CAUSAL_MODULE, q, k, v, mask)  # type: ignore[arg-type]
    assert torch.equal(due[1, :3], torch.zeros(3, 4, 16))
    for one in (k, v):
        one[1, :, :3] = float("nan")
    found, _ = attention_forward(CAUSAL_MODULE, q, k, v, mask)  # type: ignore[arg-type]
    assert torch.equal(found, due)


def test_a_window_that_is_larger_than_the_context_is_none() -> None:
    assert attention_mask(BATCH, 9, 9, local_size=64) is None
    window = attention_mask(BATCH, 9, 9, mask_function=_window(4), local_size=4)
    assert window is not None
    assert window.shape == (1, 1, 0, 4)


def _window(size: int) -> Any:
    return lambda b, h, q, k: (k <= q) & (k > q - size)


def test_a_step_over_a_static_cache_reads_no_value_of_the_mask() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as fake:
        shown, offset = torch.ones(BATCH, 9, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
        mask = attention_mask(BATCH, 1, 9, offset, attention_mask=shown)  # bool() of a fake tensor raises
    assert mask is not None
    assert (mask.dtype, mask.shape, mask.fake_mode) == (torch.bool, (BATCH, 1, 1, 9), fake)  # type: ignore[attr-defined]


def test_long_masks_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(**given: Any) -> Any:
        made = sdpa_mask(**given)
        assert made is not None
        sizes.append(made.numel())
        return made

    due = attention_mask(BATCH, 9, 9, attention_mask=LEFT.bool())
    monkeypatch.setattr(masks, "sdpa_mask", counted)
    monkeypatch.setattr(masks, "PART", 2 * 9 * BATCH)
    assert due is not None
    assert torch.equal(attention_mask(BATCH, 9, 9, attention_mask=LEFT.bool()), due)  # type: ignore[arg-type]
    assert sizes == [36, 36, 36, 36, 18]


def test_a_step_sees_its_own_chunk_of_as_many_keys_as_a_chunk() -> None:
    mask = attention_mask(BATCH, 1, 4, 6, 3, mask_function=chunked_causal_mask_function(4, torch.zeros(BATCH)),
                          attention_mask=torch.ones(BATCH, 7, dtype=torch.bool), local_size=4)  # fmt: skip
    assert mask is not None
    assert mask.tolist() == [[[[1, 4]]]] * BATCH  # of the keys 3 to 6 those from 4 on


def test_more_queries_than_keys_are_aligned_with_the_first_key() -> None:
    args = (*qkv(9, 5), None)
    mine, _ = attention_forward(CAUSAL_MODULE, *args, scaling=0.3)  # type: ignore[arg-type]
    due, _ = sdpa_attention_forward(CAUSAL_MODULE, *args, scaling=0.3)
    torch.testing.assert_close(mine, due, rtol=1e-5, atol=1e-6)


def test_a_window_without_a_mask_is_the_modules_own() -> None:
    mask = create_sliding_window_causal_mask(config("sdpa"), torch.zeros(BATCH, 9, 64), None, None)
    due, _ = sdpa_attention_forward(CAUSAL_MODULE, *qkv(9, 9), mask, scaling=0.3)
    mine, _ = attention_forward(CAUSAL_MODULE, *qkv(9, 9), None, scaling=0.3, sliding_window=4)  # type: ignore[arg-type]
    torch.testing.assert_close(mine, due, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8, 24], ids=["smaller", "larger"])
def test_values_of_another_size_and_a_bias(size: int) -> None:
    q, k, _ = qkv(9, 9)
    v = torch.randn(BATCH, 2, 9, size, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(3))
    mine, _ = attention_forward(CAUSAL_MODULE, q, k, v, None, scaling=0.3, position_bias=bias)  # type: ignore[arg-type]
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    p = (q @ k.repeat_interleave(2, 1).mT * 0.3 + bias).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(mine, (p @ v.repeat_interleave(2, 1)).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_the_scaling_is_that_of_the_keys_where_values_are_larger() -> None:
    q, k, _ = qkv(9, 9)
    v = torch.randn(BATCH, 2, 9, 24, generator=torch.Generator().manual_seed(2))
    mine, _ = attention_forward(CAUSAL_MODULE, q, k, v, None)  # type: ignore[arg-type]
    due, _ = attention_forward(CAUSAL_MODULE, q, k, v, None, scaling=16**-0.5)  # type: ignore[arg-type]
    assert torch.equal(mine, due)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"s_aux": torch.zeros(4)}], ids=["plain", "softcap", "sinks"]
)
def test_gradients_are_those_of_torch(options: dict[str, Any]) -> None:
    args = [one.requires_grad_() for one in qkv(5, 5)]
    y, _ = attention_forward(CAUSAL_MODULE, *args, None, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        due, _ = attention_forward(CAUSAL_MODULE, *args, None, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(y, due, rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in args)


@pytest.mark.parametrize("kind", ["ranges", "float"])
@pytest.mark.parametrize("options", [{}, {"s_aux": "sinks"}, {"softcap": 3.0}], ids=["plain", "sinks", "softcap"])
def test_a_query_that_sees_nothing_has_gradients_of_zero(kind: str, options: dict[str, Any]) -> None:
    sinks = torch.zeros(4, requires_grad=True)
    args = [one.requires_grad_() for one in qkv(9, 9)]
    mask = create_causal_mask(config(NAME), torch.zeros(BATCH, 9, 64), LEFT, None, None)
    if kind == "float":
        mask = torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(0), -torch.inf)
    given = options | ({"s_aux": sinks} if "s_aux" in options else {})
    attention_forward(CAUSAL_MODULE, *args, mask, **given)[0].square().sum().backward()  # type: ignore[arg-type]
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in args)
    assert sinks.grad is None or bool(sinks.grad.isfinite().all())
    assert torch.equal(args[0].grad[1, :, 0], torch.zeros(4, 16))  # type: ignore[index]


@pytest.mark.parametrize("mask", [LEFT, object()], ids=["two dimensions", "no tensor"])
def test_masks_of_another_form_are_refused(mask: Any) -> None:
    with pytest.raises(KernelError, match=r"set_attn_implementation\('sdpa'\)"):
        attention_forward(CAUSAL_MODULE, *qkv(9, 9), mask)  # type: ignore[arg-type]


def test_dropout_with_a_softcap_is_refused() -> None:
    with pytest.raises(KernelError, match="set attention_dropout to 0"):
        attention_forward(CAUSAL_MODULE, *qkv(5, 5), None, dropout=0.1, softcap=3.0)  # type: ignore[arg-type]
    dropped, _ = attention_forward(CAUSAL_MODULE, *qkv(5, 5), None, dropout=0.5)  # type: ignore[arg-type]
    assert not torch.equal(dropped, attention_forward(CAUSAL_MODULE, *qkv(5, 5), None)[0])  # type: ignore[arg-type]


def test_a_forced_implementation_runs_every_call() -> None:
    module: Any = attention.attention(CAUSAL["llama"].make().model.layers[0].self_attn, "eager")
    ran = dispatch.calls["flash_attention", "eager"]
    attention_forward(module, *qkv(5, 5), None)
    assert dispatch.calls["flash_attention", "eager"] == ran + 1
