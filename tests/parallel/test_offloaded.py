"""Models with weights that accelerate offloads: patched in place, the same numbers, and back as they came."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.fusion import read_layers
from accelpatch.parallel import device_map, offload_hook
from accelpatch.parallel.offload_hook import OffloadHook
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.offloaded import KINDS, offloaded
from tests.support.simulated import logits
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, full_batch, padded_batch

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def facts(model: nn.Module) -> dict[str, Any]:
    """What `unpatch` must bring back: modules, their hooks, what lies in memory, and what the hooks bring."""
    found: dict[str, Any] = {"map": getattr(model, "hf_device_map", None), "state": sorted(model.state_dict())}
    for path, module in model.named_modules(remove_duplicate=False):
        held = sorted(name for name in vars(module) if not name.endswith("_hooks"))
        found[path] = (id(module), type(module), vars(module).get("_hf_hook"), held)
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            weights = vars(module)["_hf_hook"].weights_map if tensor.is_meta else {name: tensor}
            found[f"{path}.{name}"] = (tensor.is_meta, tensor.shape, weights[name].double().sum().item())
    return found


@spread("kind, recipe", list(KINDS), ["int8", "exact", "int4"])
def test_numbers_of_a_patch_of_the_model_in_memory(kind: str, recipe: str, tmp_path: Path) -> None:
    name = "qwen2" if kind == "a-layer-and-the-head" else "llama"  # whose embedding is its head too
    whole = accelpatch.patch(CAUSAL[name].make(), recipe)
    model = offloaded(CAUSAL[name].make(), kind, tmp_path)
    before = facts(model)
    accelpatch.patch(model, recipe)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert report.replaced == whole.accelpatch.report().replaced
    assert torch.equal(logits(model, padded_batch()), logits(whole, padded_batch()))
    assert torch.equal(model.generate(**full_batch(), **GREEDY), whole.generate(**full_batch(), **GREEDY))
    accelpatch.unpatch(model)
    assert facts(model) == before
    assert torch.equal(logits(model, full_batch()), logits(CAUSAL[name].make(), full_batch()))


@pytest.mark.parametrize("kind", ["a-layer-and-the-head", "the-ends", "disk"])
def test_steps_are_captured_between_what_is_offloaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", EagerGraph)  # type: ignore[arg-type]
    whole = accelpatch.patch(CAUSAL["qwen2"].make(), "exact")
    model = accelpatch.patch(offloaded(CAUSAL["qwen2"].make(), kind, tmp_path), "exact")
    for options in (GREEDY, GREEDY | {"num_beams": 2}, GREEDY | {"repetition_penalty": 1.3}):
        batch = padded_batch()
        assert torch.equal(model.generate(**batch, **options), whole.generate(**batch, **options)), options
    paths = model.accelpatch.report().paths
    fused = kind != "disk"  # where there is no layer left
    assert (paths[CAPTURED] > 0) == fused, paths
    assert any(path.startswith("fused layers") for path in paths) == fused


def test_buffers_of_fused_layers_lie_where_an_offloaded_norm_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.device] = []
    before = read_layers.signalling
    monkeypatch.setattr(read_layers, "signalling", lambda *given: seen.append(given[2]) or before(*given))
    model = accelpatch.patch(offloaded(CAUSAL["qwen2"].make(), "the-ends", tmp_path), "exact")
    vars(model.model.norm)["_hf_hook"].execution_device = torch.device("cpu", 0)  # another name, not another device
    read_layers.fused_model(model)
    assert seen == [torch.device("cpu", 0)]


def test_one_site_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = offloaded(CAUSAL["qwen2"].make(), "disk", tmp_path)
    largest = max(p.numel() for p in model.parameters())
    seen: list[int] = []
    before = AlignDevicesHook.pre_forward

    def counting(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = before(self, module, *args, **kwargs)
        seen.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return made

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", counting)
    accelpatch.patch(model, "int8")
    assert 0 < max(seen) <= largest


def test_replacements_wait_on_disk_in_files_without_a_name(tmp_path: Path) -> None:
    model = offloaded(CAUSAL["qwen2"].make(), "disk", tmp_path)
    before = sorted(file.name for file in tmp_path.iterdir())
    accelpatch.patch(model, "int8")
    up = model.model.layers[0].mlp.up_proj
    assert isinstance(vars(up)["_hf_hook"], OffloadHook)
    maps = Path("/proc/self/maps").read_text().splitlines()
    address = up.layout.data.data_ptr()
    (line,) = [line for line in maps if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)]
    assert "accelpatch-" in line
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_the_report_says_what_lies_where(tmp_path: Path) -> None:
    model = offloaded(CAUSAL["qwen2"].make(num_hidden_layers=2), "a-layer", tmp_path)
    due = [
        "on cpu: model.embed_tokens, model.layers.0, model.norm, model.rotary_emb, lm_head",
        "on disk (offloaded, runs on cpu): model.layers.1",
    ]
    assert [note for note in accelpatch.plan(model, "int8").report().notes if note.startswith("on ")] == due
    accelpatch.patch(model, "int8")
    assert all(line in str(model.accelpatch.report()) for line in due)


def test_weights_that_are_not_in_host_memory_are_not_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate leaves those of a model on a GPU there, also where they are offloaded to "cpu"."""
    locked: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda one: locked.append(one) or one)
    weights = {"here": torch.zeros(2), "there": torch.zeros(2, device="meta")}
    hook = AlignDevicesHook(execution_device=torch.device("cuda:0"), offload=True, weights_map=weights)
    for name in weights:
        device_map.pin(hook, name)
    assert [id(one) for one in locked] == [id(weights["here"])]


def test_originals_that_will_not_come_back_are_freed() -> None:
    model = CAUSAL["qwen2"].make()
    offloaded(model, "cpu", Path())
    held = vars(model.model.layers[0].mlp.up_proj)["_hf_hook"].weights_map.dataset
    accelpatch.patch(model, "int8", keep_original="none")
    left = {name for name in held if name.endswith("_proj.weight")}
    assert left == set()
    assert "model.norm.weight" in held
    model.generate(**full_batch(), **GREEDY)
    with pytest.raises(PatchError, match="freed"):
        accelpatch.unpatch(model)


def test_weights_that_were_written_are_not_lost_silently(tmp_path: Path) -> None:
    model = accelpatch.patch(offloaded(CAUSAL["qwen2"].make(), "a-layer", tmp_path), "int8")
    before = logits(model, full_batch())
    up = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        up.weight.data.mul_(0.5)
    assert not torch.equal(logits(model, full_batch()), before)
    with pytest.raises(PatchError, match=r"written .*model\.layers\.1\.mlp\.up_proj"):
        accelpatch.unpatch(model)


def test_a_full_disk_is_noticed_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = offloaded(CAUSAL["qwen2"].make(), "a-layer", tmp_path)
    before = facts(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(PatchError, match=f"the replacements take .* in {tmp_path}, and 1 B are free there"):
        accelpatch.patch(model, "int8")
    assert facts(model) == before


def test_a_disk_that_fills_up_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = offloaded(CAUSAL["qwen2"].make(), "a-layer", tmp_path)
    before, calls = facts(model), Counter[str]()
    write = offload_hook.on_disk

    def failing(tensor: Tensor, folder: str) -> Tensor:
        calls["written"] += 1
        if calls["written"] > 3:
            raise OSError(28, "No space left on device")
        return write(tensor, folder)

    monkeypatch.setattr(offload_hook, "on_disk", failing)
    with pytest.raises(PatchError, match=r"No space left on device.*nothing was changed"):
        accelpatch.patch(model, "int8")
    assert facts(model) == before
