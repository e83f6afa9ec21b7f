"""Rows of docs/patched-models.md about modules, hooks, copies and wrappers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import accelpatch
from accelpatch.errors import PatchError
from tests.support.packed import patch
from tests.support.resized import OTHERS, SIZES
from tests.support.rows import REACH, off, out, row, stock, undo
from tests.support.simulated import logits
from tests.support.tiny import full_batch


@row("pickle")
def _pickle(model: Any, form: str, folder: Path) -> None:
    for one in (model, model.model, model.model.norm):
        with pytest.raises(PatchError, match="cannot be pickled"):
            pickle.dumps(one)
    undo(model)
    pickle.dumps(model)


@row("resize the embeddings")
def _resize(model: Any, form: str, folder: Path) -> None:
    for one in (model, model.model):
        with pytest.raises(PatchError, match="unpatch"):
            one.resize_token_embeddings(200)
    undo(model)
    model.resize_token_embeddings(200)
    assert model.lm_head.weight.shape[0] == 200


@row("move")
def _move(model: Any, form: str, folder: Path) -> None:
    """To the only device there is, and to none."""
    due = out(model)
    assert torch.equal(out(model.to("cpu")), due)
    undo(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@row("cast")
def _cast(model: Any, form: str, folder: Path) -> None:
    due = stock(form).half().float()
    model.half()
    assert out(model).isfinite().all()
    assert logits(model, full_batch()).dtype == torch.float16
    model.float()
    undo(model)
    assert all(torch.equal(v, due.state_dict()[k]) for k, v in model.state_dict().items())


@row("`torch.autocast`")
def _autocast(model: Any, form: str, folder: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert logits(model, full_batch()).dtype == torch.bfloat16
        undo(model)
        assert logits(model, full_batch()).dtype == torch.bfloat16


@row("deep copy of the model")
def _copy(model: Any, form: str, folder: Path) -> None:
    twin = copy.deepcopy(model)
    undo(model)
    assert hasattr(twin, "accelpatch")
    undo(twin)
    assert torch.equal(out(twin), out(stock(form)))


@row("deep copy of a part")
def _copy_part(model: Any, form: str, folder: Path) -> None:
    part = copy.deepcopy(model.model)
    due = stock(form).model
    assert [(n, type(m)) for n, m in part.named_modules()] == [(n, type(m)) for n, m in due.named_modules()]


@row("hooks of torch")
def _hooks(model: Any, form: str, folder: Path) -> None:
    seen: list[int] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *args: seen.append(1))
    out(model)
    undo(model)
    out(model)
    assert seen == [1, 1]


def dispatched(model: Any) -> Any:
    places = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return dispatch_model(model, device_map=places, force_hooks=True)


@row("hooks of accelerate before the patch")
def _hooks_before(model: Any, form: str, folder: Path) -> None:
    model = patch(dispatched(stock(form)), form)
    assert hasattr(model.model.layers[0].mlp.up_proj, "_hf_hook")
    assert off(model, stock(form)) < REACH[form]
    undo(model)
    assert hasattr(model.model.layers[0].mlp.up_proj, "_hf_hook")


@row("hooks of accelerate after the patch")
def _hooks_after(model: Any, form: str, folder: Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(PatchError, match="remove_hook_from_module"):
        accelpatch.unpatch(model)
    remove_hook_from_module(model, recurse=True)
    undo(model)
    assert torch.equal(out(model), out(stock(form)))


@row("offloaded weights before the patch")
def _offloaded(model: Any, form: str, folder: Path) -> None:
    model = patch(cpu_offload(stock(form), torch.device("cpu")), form)
    assert off(model, stock(form)) < REACH[form]
    undo(model)
    assert torch.equal(out(model), out(stock(form)))
    assert all(p.is_meta for p in model.parameters())


@row("put another module")
def _module(model: Any, form: str, folder: Path) -> None:
    before = out(model)
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    assert not torch.allclose(out(model), before)
    undo(model)
    assert type(model.model.layers[0].mlp.act_fn) is nn.Tanh


@row("put in modules of other sizes")
def _sizes(model: Any, form: str, folder: Path) -> None:
    plain = stock(form)
    for change in (SIZES["pruned-heads"], SIZES["pruned-mlp"], OTHERS["low-rank-o"][1]):
        for one in (model, plain):
            change(one)
            one.to(plain.dtype)
        assert off(model, plain) < REACH[form]
        assert model.generate(**full_batch(), max_new_tokens=3, do_sample=False).shape == (3, 12)
    undo(model)
    assert torch.equal(out(model), out(plain))


@row("set embeddings")
def _embeddings(model: Any, form: str, folder: Path) -> None:
    head = nn.Linear(64, 140, bias=False, dtype=model.dtype)
    model.set_output_embeddings(head)
    assert model.generate(**full_batch(), max_new_tokens=3, do_sample=False).shape == (3, 12)
    undo(model)
    assert model.get_output_embeddings() is head


@row("put a `forward`")
def _forward(model: Any, form: str, folder: Path) -> None:
    norm = model.model.norm
    norm.forward = lambda x: x * 0
    assert not out(model).any()
    with pytest.raises(PatchError, match="delete it first"):
        accelpatch.unpatch(model)
    del norm.forward
    undo(model)


@row("replace a method of a class")
def _method(model: Any, form: str, folder: Path) -> None:
    before = out(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", lambda self, x: 0 * x)
        assert not out(model).any()
    assert torch.equal(out(model), before)
    undo(model)


@row("give a module a subclass")
def _subclass(model: Any, form: str, folder: Path) -> None:
    norm, own = model.model.norm, type(model.model.norm)
    norm.__class__ = type("Zero", (LlamaRMSNorm,), {"forward": lambda self, x: 0 * x})
    assert not out(model).any()
    with pytest.raises(PatchError):
        accelpatch.unpatch(model)
    norm.__class__ = own
    undo(model)


@row("override the methods of generation")
def _generation(model: Any, form: str, folder: Path) -> None:
    stock, calls = model.prepare_inputs_for_generation, list[int]()
    model.prepare_inputs_for_generation = lambda *args, **given: calls.append(1) or stock(*args, **given)
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert len(calls) == 4
    undo(model)
    assert "prepare_inputs_for_generation" in vars(model)


@row("set an attribute")
def _attribute(model: Any, form: str, folder: Path) -> None:
    before = out(model)
    model.model.norm.variance_epsilon = 1.0
    assert not torch.allclose(out(model), before)
    model.train()
    undo(model)
    assert model.model.norm.variance_epsilon == 1.0
    assert all(module.training for module in model.modules())


@row("freeze")
def _freeze(model: Any, form: str, folder: Path) -> None:
    model.requires_grad_(False)
    undo(model)
    assert not any(p.requires_grad for p in model.parameters())


@row("`torch.compile(model)`")
def _compile(model: Any, form: str, folder: Path) -> None:
    compiled = torch.compile(model, backend="eager")
    batch = full_batch() | {"use_cache": False}
    torch.testing.assert_close(logits(compiled, batch), logits(model, batch), rtol=1e-2, atol=1e-2)
    undo(model)
    with pytest.raises(PatchError, match="compiled"):
        patch(torch.compile(model, backend="eager"), form)
    torch.compiler.reset()


@row("`DistributedDataParallel`")
def _ddp(model: Any, form: str, folder: Path) -> None:
    due = out(model)
    sync = form != "fp8"  # gloo sends no 8-bit floats
    wrapped = nn.parallel.DistributedDataParallel(model, init_sync=sync, broadcast_buffers=sync)
    assert torch.equal(logits(wrapped, full_batch()).float(), due)
    undo(wrapped.module)


@row("FSDP")
def _fsdp(model: Any, form: str, folder: Path) -> None:
    sharded = fully_shard(stock(form))
    with pytest.raises(PatchError, match=r"FSDP|DTensor"):
        patch(sharded, form)


@row("patch again")
def _again(model: Any, form: str, folder: Path) -> None:
    with pytest.raises(PatchError, match="already patched"):
        patch(model, form)
    undo(model)
    patch(model, form)


@row("free the originals")
def _free(model: Any, form: str, folder: Path) -> None:
    undo(model)
    options: dict[str, Any] = {"keep_original": "none", "verify": False}
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    accelpatch.patch(model, "exact" if form in ("exact", "compact") else "int8", **options)
    if form in ("exact", "compact"):
        undo(model)
        return
    gc.collect()
    assert weight() is None
    with pytest.raises(PatchError, match="originals were freed"):
        accelpatch.unpatch(model)


@row("run a script")
def _exec(model: Any, form: str, folder: Path) -> None:
    undo(model)
    said: list[str] = []
    recipe = form if form in ("exact", "int8", "int4") else "exact"
    with accelpatch.patch_on_first_use(recipe, verify=False, on_left=lambda one, why: said.append(why)):
        out(model)
        assert hasattr(model, "accelpatch")
        model.save_pretrained(folder)
    assert not hasattr(model, "accelpatch")
    assert said == ["unpatched, since the script asked for save_pretrained"]
