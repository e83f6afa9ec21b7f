"""The vLLM plugin against the recorded names and parameters of two releases, with weights that are really multiplied.

The stand-in for vLLM is made of tests/fixtures/vllm/*.json, which scripts/make_fixtures/make_vllm_signatures.py writes.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from accelpatch import api
from accelpatch.errors import LoadError
from accelpatch.serving import vllm_plugin

RELEASES = sorted((Path(__file__).parent.parent / "fixtures/vllm").glob("*.json"))
OURS = "accelpatch.serving.vllm_methods"
BASES: dict[str, type] = {"PluggableLayer": nn.Module}
TOGETHER = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def stand_in(recorded: dict[str, Any]) -> dict[str, ModuleType]:
    """Modules with the classes of a release, whose methods do nothing."""
    made: dict[str, type] = {}
    modules: dict[str, ModuleType] = {}
    pending = [(module, name, facts) for module, names in recorded.items() for name, facts in names.items()]
    while pending:
        module, name, facts = pending.pop(0)
        held = modules.setdefault(module, ModuleType(module))
        if "parameters" in facts:
            continue
        known = BASES | {"ABC": object} | made
        if not all(base in known for base in facts["bases"]):
            pending.append((module, name, facts))
            continue
        bases = tuple(known[base] for base in facts["bases"] if base != "ABC") or (object,)
        methods = {one: lambda self, *_, **__: None for one in facts["methods"] if not issubclass(bases[0], nn.Module)}
        made[name] = type(name, bases, methods)
        setattr(held, name, made[name])
    return modules


@pytest.fixture(params=RELEASES, ids=lambda path: path.stem)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """recorded: the signatures. registered: what the plugin registered. methods: its module."""
    recorded = json.loads(request.param.read_text())
    modules = stand_in(recorded)
    registered: dict[str, type] = {}
    quantization = modules["vllm.model_executor.layers.quantization"]
    quantization.QUANTIZATION_METHODS = []

    def register(name: str) -> Any:
        def keep(kind: type) -> type:
            registered[name] = kind
            quantization.QUANTIZATION_METHODS.append(name)
            return kind

        return keep

    quantization.register_quantization_config = register
    mapper = modules["vllm.model_executor.models.utils"]
    mapper.WeightsMapper = lambda **fields: SimpleNamespace(**fields)
    for name, module in modules.items():
        for place in range(1, name.count(".") + 1):
            package = ".".join(name.split(".")[:place])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    vllm_plugin.register()
    vllm_plugin.register()
    yield SimpleNamespace(recorded=recorded, registered=registered, methods=sys.modules[OURS], modules=modules)
    sys.modules.pop(OURS, None)


def tiny(folder: Path, *, tied: bool, recipe: str) -> Path:
    """A saved patched Llama whose heads and inner sizes take groups."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "float")
    api.quantize(str(folder / "float"), recipe, folder / "saved", verify="off")
    return folder / "saved"


def layer_of(vllm: SimpleNamespace, kind: str) -> Any:
    for module in vllm.modules.values():
        if hasattr(module, kind):
            return getattr(module, kind)()
    raise AssertionError(kind)


def filled(folder: Path, method: Any, layer: Any, paths: list[str], sizes: list[int], k: int) -> None:
    """What vLLM does with a layer: weights are made, the checkpoint's are laid together in them, and processed."""
    method.create_weights(layer, k, sizes, k, sum(sizes), torch.float32, weight_loader=lambda *_: None)
    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        for name, parameter in layer.named_parameters():
            whole = torch.cat([file.get_tensor(f"{path}.{name}") for path in paths], parameter.output_dim)
            assert parameter.shape == whole.shape
            parameter.data.copy_(whole)
    method.process_weights_after_loading(layer)
    assert not list(layer.parameters())


def config_of(vllm: SimpleNamespace, folder: Path) -> Any:
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    found = vllm.registered[described["quant_method"]].from_config(described)
    found.packed_modules_mapping = TOGETHER
    found.maybe_update_config(str(folder), hf_config=None, revision=None)
    return found


def test_signatures(vllm: SimpleNamespace) -> None:
    """Each method of ours takes the arguments that a release has for it, by name and in their order."""
    recorded = {name: facts for names in vllm.recorded.values() for name, facts in names.items()}
    checked = 0
    for ours, theirs in {
        "SavedConfig": "QuantizationConfig", "SavedLinearMethod": "LinearMethodBase",
        "SavedEmbeddingMethod": "QuantizeMethodBase",
    }.items():  # fmt: skip
        kind = getattr(vllm.methods, ours)
        for name, parameters in recorded[theirs]["methods"].items():
            if name not in vars(kind) or "*args" in parameters:
                continue
            given = [one for one in parameters if one not in ("self", "cls") and "*" not in one]
            of_ours = inspect.signature(getattr(kind, name))
            first = [] if isinstance(inspect.getattr_static(kind, name), classmethod | staticmethod) else [None]
            of_ours.bind(*first, **dict.fromkeys(given))
            of_ours.bind(*first, *given)
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("recipe", ["int8", "int4", "fp8"])
def test_layers(vllm: SimpleNamespace, tmp_path: Path, recipe: str) -> None:
    """Its layers multiply as the patched model's do, several of the checkpoint's in one of vLLM's too."""
    folder = tiny(tmp_path, tied=False, recipe=recipe)
    config, patched = config_of(vllm, folder), api.load(str(folder)).model
    attention = patched.model.layers[0].self_attn
    x = torch.randn(3, 128)
    prefix = "model.layers.0.self_attn"
    method = config.get_quant_method(layer := layer_of(vllm, "LinearBase"), f"{prefix}.qkv_proj")
    filled(folder, method, layer, [f"{prefix}.{name}" for name in TOGETHER["qkv_proj"]], [128, 64, 64], 128)
    expected = torch.cat([getattr(attention, name)(x) for name in TOGETHER["qkv_proj"]], -1)
    torch.testing.assert_close(method.apply(layer, x), expected, rtol=1e-4, atol=1e-4)
    bias = torch.randn(256)
    torch.testing.assert_close(method.apply(layer, x, bias), expected + bias, rtol=1e-4, atol=1e-4)
    method = config.get_quant_method(head := layer_of(vllm, "ParallelLMHead"), "lm_head")
    filled(folder, method, head, ["lm_head"], [260], 128)
    torch.testing.assert_close(method.apply(head, x), patched.lm_head(x), rtol=1e-4, atol=1e-4)
    assert config.get_quant_method(layer_of(vllm, "VocabParallelEmbedding"), "") is None  # the table is float
    assert vars(config.get_checkpoint_weight_mapper()) == {}


def test_a_tied_table(vllm: SimpleNamespace, tmp_path: Path) -> None:
    """It is saved as the head; vLLM looks for the embeddings, which it gives no prefix."""
    folder = tiny(tmp_path, tied=True, recipe="int8")
    config, patched = config_of(vllm, folder), api.load(str(folder)).model
    method = config.get_quant_method(table := layer_of(vllm, "VocabParallelEmbedding"), "")
    assert config.get_checkpoint_weight_mapper().orig_to_new_prefix == {"lm_head.": "model.embed_tokens."}
    filled(folder, method, table, ["lm_head"], [260], 128)
    ids = torch.tensor([[0, 7], [259, 3]])
    torch.testing.assert_close(method.embedding(table, ids), patched.model.embed_tokens(ids))
    assert method.tie_weights(layer_of(vllm, "ParallelLMHead"), table) is table


def test_ranks(vllm: SimpleNamespace, tmp_path: Path) -> None:
    """Rows are cut anywhere, inputs between groups alone."""
    folder = tiny(tmp_path, tied=False, recipe="int8")
    method = config_of(vllm, folder).get_quant_method(
        layer := layer_of(vllm, "LinearBase"), "model.layers.0.mlp.down_proj"
    )
    method.create_weights(layer, 128, [128], 256, 128, torch.float32, weight_loader=None)
    assert {name: list(one.shape) for name, one in layer.named_parameters()} == {"q": [128, 128], "scale": [128, 1]}
    assert layer.q.input_dim == layer.scale.input_dim == 1
    with pytest.raises(LoadError, match="cannot be split over these ranks"):
        method.create_weights(layer, 64, [128], 256, 128, torch.float32, weight_loader=None)


def test_refusals(vllm: SimpleNamespace, tmp_path: Path) -> None:
    config = vllm.registered["accelpatch"]
    with pytest.raises(LoadError, match="version 99 of accelpatch's format"):
        config.from_config({"version": 99})
    with pytest.raises(LoadError, match="is no folder here"):
        config.from_config({"version": 1}).maybe_update_config("org/model")
    with pytest.raises(LoadError, match="hides from the accelpatch plugin"):
        config.from_config({"version": 1}).get_quant_method(layer_of(vllm, "LinearBase"), "x")
    assert config.from_config({"version": 1}).get_quant_method(nn.Identity(), "x") is None
