"""Attention by other packages, none of which is installed: their recorded signatures stand in for them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch import device as devices
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.ops.attention import packages as attention_packages
from accelpatch.kernels.spec import Spec

H100, MI300X = devices.KNOWN["sm_90"], devices.KNOWN["gfx942"]
# flash-attn 2.8, flash-attn 3 (its hopper folder) and AITER: names and defaults as in their sources
FLASH_2 = (
    "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
FLASH_3 = (
    "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
AITER = (
    "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None, "
    "deterministic=True, return_lse=False, return_attn_probs=False"
)
PACKAGES = {
    "flash_attn_3": ("flash_attn_interface", FLASH_3, H100, False),
    "flash_attn_2": ("flash_attn", FLASH_2, H100, False),
    "aiter": ("aiter", AITER, MI300X, True),
}


def recorded(signature: str, as_tuple: bool, seen: list[dict[str, Any]]) -> Callable[..., Any]:
    """A function with a package's signature that computes by the reference; `seen` receives its arguments."""
    scope: dict[str, Any] = {}
    exec(f"def flash_attn_func({signature}): pass", scope)
    form = inspect.signature(scope["flash_attn_func"])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        seen.append(dict(given))
        q, k, v = (given[name].transpose(1, 2) for name in "qkv")
        left, right = given["window_size"][:2]
        assert right in (-1, 0)
        y = flash_attention.reference(
            q, k, v, None, None, None, given["causal"], left + 1, given.get("softcap", 0.0), given["softmax_scale"]
        )
        return (y, None) if as_tuple else y

    return function


def qkv(length: int = 5, keys: int = 9) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 16), (2, 2, keys, 16), (2, 2, keys, 16))
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def spec(**options: Any) -> Spec:
    return flash_attention.of_shape(4, 2, 16, torch.bfloat16, b=2, length=5, keys=9, **options)


def install(monkeypatch: pytest.MonkeyPatch, package: str, **members: Any) -> None:
    module = ModuleType(package)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, package, module)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("call", [{}, {"causal": False}, {"window": 3}, {"softcap": 2.0}], ids=str)
def test_calls_fit_the_recorded_signature(monkeypatch: pytest.MonkeyPatch, name: str, call: dict[str, Any]) -> None:
    package, signature, device, as_tuple = PACKAGES[name]
    seen: list[dict[str, Any]] = []
    install(monkeypatch, package, flash_attn_func=recorded(signature, as_tuple, seen))
    reason = dispatch.why_not(flash_attention.OP, name, spec(**call), device)
    if name == "aiter" and "softcap" in call:
        assert reason == "AITER is used without a softcap"
        return
    assert reason is None
    args = (*qkv(), None, None, None, call.get("causal", True), call.get("window", 0), call.get("softcap", 0.0), 0.3)
    y = attention_packages.IMPLEMENTATIONS[name].run(*args)
    assert isinstance(y, Tensor)
    assert y.is_contiguous()
    assert torch.equal(y, flash_attention.reference(*args))
    assert seen[0]["q"].shape == (2, 5, 4, 16)
    assert seen[0].get("dropout_p", 0.0) == 0.0


def test_xformers_gets_grouped_heads_and_the_lower_right_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Triangle:
        pass

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: Any = None
    ) -> Any:
        assert query.shape == (2, 5, 2, 2, 16)
        assert key.shape == value.shape == (2, 9, 2, 2, 16)
        q, k, v = (one.flatten(2, 3).transpose(1, 2) for one in (query, key, value))
        y = flash_attention.reference(q, k, v, None, None, None, isinstance(attn_bias, Triangle), 0, 0.0, scale)
        return y.unflatten(2, (2, 2))

    bias = SimpleNamespace(LowerTriangularFromBottomRightMask=Triangle)
    ops = {"memory_efficient_attention": attend, "LowerTriangularMask": None}
    install(monkeypatch, "xformers")
    install(monkeypatch, "xformers.ops", **ops, fmha=SimpleNamespace(attn_bias=bias))
    for causal in (True, False):
        assert dispatch.why_not(flash_attention.OP, "xformers", spec(causal=causal), H100) is None
        args = (*qkv(), None, None, None, causal, 0, 0.0, 0.3)
        assert torch.equal(attention_packages.by_xformers(*args), flash_attention.reference(*args))


@pytest.mark.parametrize(
    "name, device, reason",
    [
        ("flash_attn_3", H100, "FlashAttention 3 is not installed: there is no module flash_attn_interface"),
        ("flash_attn_3", MI300X, "FlashAttention 3 is for Hopper, not gfx942"),
        ("flash_attn_2", MI300X, "FlashAttention 2 is not installed: there is no module flash_attn"),
        ("flash_attn_2", replace(H100, arch="sm_75"), "FlashAttention 2 starts at sm_80, not sm_75"),
        ("aiter", H100, "AITER is for CDNA 3 and 4, not sm_90"),
        ("aiter", MI300X, "AITER is not installed: there is no module aiter"),
        ("hub", H100, "a kernel of the hub is not installed: there is no module kernels"),
        ("xformers", replace(devices.probe("cpu")), "xformers runs on GPUs"),
    ],
)
def test_what_is_missing_is_a_reason(name: str, device: Any, reason: str) -> None:
    assert dispatch.why_not(flash_attention.OP, name, spec(), device) == reason


@pytest.mark.parametrize("what", [{"ranges": True}, {"bias": torch.bool}, {"sinks": True}], ids=str)
def test_limits_are_reasons(monkeypatch: pytest.MonkeyPatch, what: dict[str, Any]) -> None:
    install(monkeypatch, "flash_attn", flash_attn_func=None)
    reason = dispatch.why_not(flash_attention.OP, "flash_attn_2", spec(**what), H100)
    assert reason == f"FlashAttention 2 is used without {next(iter(what))}"


def test_the_hub_is_read_from_the_disk_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    folder = tmp_path / "models--kernels-community--flash-attn2" / "snapshots" / "0" / "build"
    loaded: list[Any] = []

    def get_local_kernel(path: Any, package: str) -> Any:
        loaded.append((path, package))
        return SimpleNamespace(flash_attn_func=recorded(FLASH_2, False, []))

    install(monkeypatch, "kernels", get_local_kernel=get_local_kernel)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    attention_packages.on_disk.cache_clear()
    attention_packages._of_hub.cache_clear()
    try:
        assert "lies in the hub's cache" in str(dispatch.why_not(flash_attention.OP, "hub", spec(), H100))
        folder.mkdir(parents=True)
        attention_packages.on_disk.cache_clear()
        assert dispatch.why_not(flash_attention.OP, "hub", spec(), H100) is None
        args = (*qkv(), None, None, None, True, 0, 0.0, 0.3)
        assert torch.equal(attention_packages.IMPLEMENTATIONS["hub"].run(*args), flash_attention.reference(*args))  # type: ignore[arg-type]
        assert loaded == [(folder.parent, "flash_attn2")]
    finally:
        attention_packages.on_disk.cache_clear()
        attention_packages._of_hub.cache_clear()
