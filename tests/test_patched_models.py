"""docs/patched-models.md: each row of its table is run."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn
from torch.distributed.fsdp import fully_shard

import accelpatch
from accelpatch.errors import KernelError, PatchError
from tests.adapters.lora import config, peft
from tests.families.simulated import logits
from tests.families.tiny import full_batch
from tests.support.packed import PATCHES, plain

DOC = Path(__file__).parent.parent / "docs" / "patched-models.md"
ROWS = re.findall(r"^\| (?!what is done|---)(.*?) \|", DOC.read_text(), re.MULTILINE)
FORMS = ("exact", *PATCHES)
RUN: dict[str, Callable[[Any, str, Path], None]] = {}


def row(start: str) -> Callable[[Callable[[Any, str, Path], None]], Callable[[Any, str, Path], None]]:
    """Registers what runs the row whose first cell begins so; given a patched model, its format and a folder."""

    def register(function: Callable[[Any, str, Path], None]) -> Callable[[Any, str, Path], None]:
        (name,) = [one for one in ROWS if one.startswith(start)]
        assert name not in RUN
        RUN[name] = function
        return function

    return register


def patch(model: Any, form: str) -> Any:
    return accelpatch.patch(model, "exact", verify=False) if form == "exact" else PATCHES[form](model)


def stock(form: str) -> Any:
    return plain("llama", form, tie_word_embeddings=False)


def out(model: Any) -> torch.Tensor:
    return logits(model, full_batch()).float()


def off(one: Any, other: Any) -> float:
    return float((out(one) - out(other)).norm() / out(other).norm())


def undo(model: Any) -> None:
    """Unpatch, and nothing of the patch is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelpatch.unpatch(model)
    assert not [m for m in model.modules() if hasattr(type(m), "replaced_class")]


def adapted(model: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(target_modules=["q_proj", "v_proj"], **changes)).eval()


REACH = {"exact": 1e-3, "int8": 0.1, "int4": 0.8, "fp8": 0.3, "compact": 0.05}


def test_every_row_is_run() -> None:
    assert len(ROWS) == len(set(ROWS)) > 30
    assert sorted(RUN) == sorted(ROWS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, form: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(is_gradient_checkpointing|weights were written).*")
        RUN[name](patch(stock(form), form), form, tmp_path)


@row("`model.generate`")
def _run(model: Any, form: str, folder: Path) -> None:
    assert model.generate(**full_batch(), max_new_tokens=3, do_sample=False).shape == (3, 12)
    undo(model)
    assert torch.equal(out(model), out(stock(form)))


@row("train the model")
def _train(model: Any, form: str, folder: Path) -> None:
    batch = full_batch() | {"labels": full_batch()["input_ids"]}
    model.train()
    with pytest.raises((KernelError, RuntimeError), match="no gradient"):
        model(**batch).loss.backward()
    undo(model)
    model(**batch).loss.backward()


@row("train a copy of a part")
def _train_copy(model: Any, form: str, folder: Path) -> None:
    model = adapted(model, modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("modules_to_save" in name)
    model(**full_batch(), labels=full_batch()["input_ids"]).loss.backward()
    (learnt,) = [p for p in model.parameters() if p.requires_grad]
    assert learnt.grad is not None
    undo(model)
    assert next(p for p in model.parameters() if p.requires_grad) is learnt


@row("add, switch, delete adapters")
def _adapters(model: Any, form: str, folder: Path) -> None:
    model = adapted(model)
    model.add_adapter("other", config(use_dora=True))
    model.set_adapter("other")
    model.delete_adapter("default")
    due = out(model)
    undo(model)
    assert (out(model) - due).norm() / due.norm() < REACH[form]


@row("merge an adapter")
def _merge(model: Any, form: str, folder: Path) -> None:
    merged = adapted(model).merge_and_unload()
    due = adapted(stock(form)).merge_and_unload()
    assert off(merged, due) < REACH[form]
    undo(merged)
    assert off(merged, due) < REACH[form]


@row("unmerge an adapter")
def _unmerge(model: Any, form: str, folder: Path) -> None:
    model = adapted(model)
    model.merge_adapter()
    model.unmerge_adapter()
    with model.disable_adapter():
        assert off(model, stock(form)) < REACH[form]


@row("start an adapter from the weight")
def _pissa(model: Any, form: str, folder: Path) -> None:
    assert off(adapted(model, init_lora_weights="pissa"), stock(form)) < REACH[form]


@row("save an adapter")
def _save_adapter(model: Any, form: str, folder: Path) -> None:
    model = adapted(model, modules_to_save=["norm"])
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(stock(form), folder).eval()
    assert off(again, model) < REACH[form]


@row("write into a weight")
def _write(model: Any, form: str, folder: Path) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= 0
    assert not model.model.layers[0].mlp.down_proj.weight.any()
    undo(model)
    assert not model.model.layers[0].mlp.down_proj.weight.any()


@row("replace a packed weight")
def _replace(model: Any, form: str, folder: Path) -> None:
    layer = model.model.layers[0].mlp.down_proj
    new = nn.Parameter(torch.zeros_like(layer.weight))
    if form == "exact":
        layer.weight = new
        undo(model)
        assert model.model.layers[0].mlp.down_proj.weight is new
        return
    with pytest.raises(PatchError, match="packed and cannot be replaced"):
        layer.weight = new
    undo(model)
    model.model.layers[0].mlp.down_proj.weight = new


@row("train a packed weight")
def _train_packed(model: Any, form: str, folder: Path) -> None:
    if form != "exact":
        with pytest.raises(PatchError, match="cannot be trained"):
            model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    undo(model)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_()


@row("save the model")
def _save(model: Any, form: str, folder: Path) -> None:
    for one in (model, model.model):
        with pytest.raises(PatchError, match="unpatch"):
            one.save_pretrained(folder)
    assert list(folder.iterdir()) == []
    undo(model)
    model.save_pretrained(folder)


@row("`state_dict()`")
def _state(model: Any, form: str, folder: Path) -> None:
    names = {name.rpartition(".")[2] for name in model.state_dict()}
    assert names <= ({"weight"} if form in ("exact", "compact") else {"weight", "q", "scale", "offset"})
    undo(model)
    assert list(model.state_dict()) == list(stock(form).state_dict())


@row("`load_state_dict`")
def _load(model: Any, form: str, folder: Path) -> None:
    other = stock(form)
    for parameter in other.parameters():
        parameter.data *= 0.5
    model.load_state_dict(other.state_dict())
    assert off(model, other) < REACH[form]
    model.load_state_dict(patch(copy.deepcopy(other), form).state_dict())
    undo(model)
    assert off(model, other) < REACH[form]


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
    with pytest.raises(PatchError, match="offloaded"):
        patch(cpu_offload(stock(form), torch.device("cpu")), form)


@row("put another module")
def _module(model: Any, form: str, folder: Path) -> None:
    before = out(model)
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    assert not torch.allclose(out(model), before)
    undo(model)
    assert type(model.model.layers[0].mlp.act_fn) is nn.Tanh


@row("set embeddings")
def _embeddings(model: Any, form: str, folder: Path) -> None:
    head = nn.Linear(64, 160, bias=False, dtype=model.dtype)
    model.set_output_embeddings(head)
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


@row("set an attribute")
def _attribute(model: Any, form: str, folder: Path) -> None:
    model.train()
    undo(model)
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


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


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
    accelpatch.patch(model, "exact" if form in ("exact", "compact") else "int8", **options)
    if form in ("exact", "compact"):
        undo(model)
        return
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
    assert said == ["save_pretrained was called, which the original does"]
