"""Fused decoder layers of encoder-decoders: stock generate()'s tokens, and proof that they ran.

On a CPU as they are, where no native step runs instead (tests/runtime/cpu/test_encoder_decoder.py); and in captured
steps, for which the CPU is put into the table of graphs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.fusion import cross_replacer, verified_laid_out
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.cross_layer import FusedCross
from accelpatch.fusion.verified_cross import cross_layers
from accelpatch.fusion.verified_laid_out import Run
from accelpatch.models.encoder_decoders import FORMS
from accelpatch.patching.verify import UNITS, SiteErrors
from accelpatch.runtime.cpu import native_step
from accelpatch.runtime.graphs import capture
from tests.support.encoder_decoders import FAMILIES, StrictGraph, encoder_decoder, given_to, texts

LAYERS, NEW = 2, 32
WAYS: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 3}}
FUSED = [name for name in FAMILIES if name != "umt5"]  # each of whose layers has a bias of its own


@pytest.fixture(autouse=True)
def without_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run by themselves."""

    def none(model: Any) -> None:
        raise CannotFuse("this test runs layers")

    monkeypatch.setattr(native_step, "native_encoder_decoder", none)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a GPU."""
    monkeypatch.setitem(capture.GRAPHS, "cpu", StrictGraph)
    monkeypatch.setattr(cross_replacer, "WITHOUT_STEPS", ())


def model_of(name: str, **changes: Any) -> Any:
    model = encoder_decoder(name, eos_token_id=None, **changes)
    torch.manual_seed(3)
    for path, parameter in model.named_parameters():  # biases and norms that do something
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("weight" in path), std=0.1)
    return model


def patched(model: Any, recipe: str = "exact") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelpatch.patch(model, recipe)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Context manager: counts calls that run fused."""
    found, own = [0], FusedCross.__call__

    def count(self: FusedCross, *args: Any) -> Tensor:
        found[0] += 1
        return own(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedCross, "__call__", count)
        yield found


def test_every_class_of_the_table_has_a_model_here() -> None:
    here = {type(module).__name__ for name in FAMILIES for module in encoder_decoder(name).modules()}
    copies = {"PLBartDecoderLayer", "BlenderbotSmallDecoderLayer", "Speech2TextDecoderLayer"}
    assert FORMS.keys() - here <= copies


def fused_as_stock(model: Any, given: dict[str, Any], ways: Any = WAYS, recipe: str = "exact", **more: Any) -> None:
    """Patch a model: its tokens are those that it made before, all layers run fused, and unpatching gives it back."""
    options = {"max_new_tokens": NEW, **more}
    due = {way: model.generate(**given, **options, **ways[way]) for way in ways}
    state = {key: one.clone() for key, one in model.state_dict().items()}
    patched(model, recipe)
    report = model.accelpatch.report()
    assert f"{LAYERS} of {LAYERS} layers fused" in str(report)
    assert report.verification.fused_layers == LAYERS
    for way in ways:
        with counted() as calls:
            made = model.generate(**given, **options, **ways[way])
        assert torch.equal(made, due[way])
        assert calls[0] >= LAYERS * (options["max_new_tokens"] - 1)
    assert all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    accelpatch.unpatch(model)
    assert not cross_layers(model)
    assert torch.equal(model.generate(**given, do_sample=False, **options), due["greedy"])


@pytest.mark.parametrize("name", FUSED)
def test_tokens_of_every_family_in_captured_steps(name: str, steps: None) -> None:
    fused_as_stock(model_of(name), given_to(name))


@pytest.mark.parametrize("name", FUSED)
def test_tokens_of_every_family_on_a_cpu(name: str) -> None:
    fused_as_stock(model_of(name), given_to(name), {"greedy": WAYS["greedy"]})


@pytest.mark.parametrize("name", ["bart", "flan-t5", "whisper"])
def test_more_rows_than_a_launch_takes(name: str, steps: None) -> None:
    given = {key: one.repeat_interleave(5, 0) for key, one in given_to(name).items()}
    fused_as_stock(model_of(name), given, {"greedy": WAYS["greedy"]}, max_new_tokens=8)


@pytest.mark.parametrize("on", ["cpu", "steps"])
def test_encoders_of_other_lengths_masks_and_begun_texts(on: str, request: pytest.FixtureRequest) -> None:
    if on == "steps":
        request.getfixturevalue("steps")
    for name in ("m2m100", "t5"):
        model = model_of(name)
        cases: list[dict[str, Any]] = [texts(length) for length in (40, 9, 70)]
        begun = torch.tensor([[3, 9, 12], [3, 11, 7], [3, 8, 8]])
        cases.append({**texts(), "decoder_input_ids": begun})
        cases.append({**cases[-1], "decoder_attention_mask": begun.ne(11).long()})
        with torch.no_grad():
            states = model.get_encoder()(**texts(20))
        cases.append({"encoder_outputs": states, "attention_mask": texts(20)["attention_mask"]})
        cases.append({"encoder_outputs": type(states)(last_hidden_state=-states[0])})
        due = [model.generate(**copy.deepcopy(case), max_new_tokens=8, do_sample=False) for case in cases]
        patched(model)
        with counted() as calls:
            made = [model.generate(**copy.deepcopy(case), max_new_tokens=8, do_sample=False) for case in cases]
        assert calls[0] >= len(cases) * LAYERS * 7
        assert all(torch.equal(*both) for both in zip(made, due, strict=True))


def test_a_row_whose_mask_hides_everything_runs_the_stock_loop(steps: None) -> None:
    model, given = model_of("bart"), texts()
    given["attention_mask"][1] = 0
    due = model.generate(**given, max_new_tokens=8, do_sample=False)
    patched(model)
    assert torch.equal(model.generate(**given, max_new_tokens=8, do_sample=False), due)
    assert "stock loop: a row whose mask hides all that the encoder gave" in model.accelpatch.report().paths


def test_a_layer_over_its_bound_runs_its_modules_within_the_step(steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = model_of("bart"), FusedCross.__call__
    due = model.generate(**texts(), max_new_tokens=8, do_sample=False)

    def wrong(self: FusedCross, x: Tensor, *args: Any) -> Tensor:
        return own(self, x, *args) * (1.0 if self.place else 1.01)

    monkeypatch.setattr(FusedCross, "__call__", wrong)
    monkeypatch.setattr(verified_laid_out, "first_of_kind", lambda layers: list(range(len(layers))))
    patched(model)
    assert f"1 of {LAYERS} layers fused" in str(model.accelpatch.report())
    assert torch.equal(model.generate(**texts(), max_new_tokens=8, do_sample=False), due)
    assert model.accelpatch.report().paths["fused layers, but modules in layers [0]"] == 7


@pytest.mark.parametrize("tokens", [12, 100, 1500])
def test_the_bound_is_above_the_error_of_torchs_own_attention(tokens: int) -> None:
    """In float32, which is 12 units from float64 over 1,500 tokens, and the bound of a layer without them is 8."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(2, 8, count, 64) for count in (1, tokens, tokens))
    due = scaled_dot_product_attention(query.double(), keys.double(), values.double()).float()
    found = scaled_dot_product_attention(query, keys, values)
    errors = errors_of(found, due, tokens)
    assert errors.kernel_bound is not None
    assert 0 < errors.units <= errors.kernel_bound


def test_a_wrong_layer_is_over_its_bound_behind_many_tokens_too() -> None:
    due = torch.ones(1, 1, 64)
    errors = errors_of(due * (1 + 30 * UNITS[torch.float32]), due, 1500)
    assert errors.kernel_bound is not None
    assert errors.units > errors.kernel_bound > errors_of(due, due, 12).kernel_bound == 8  # type: ignore[operator]


def errors_of(found: Tensor, due: Tensor, tokens: int) -> SiteErrors:
    run = Run(found, due, [due], lambda seed: due, tokens)
    return verified_laid_out.errors_of(nn.Linear(4, 4), [run], "relative_rmse")  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["int8", "smoothquant"])
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_quantised_layers_on_a_cpu_are_as_their_modules(name: str, recipe: str) -> None:
    model, options = patched(model_of(name), recipe), {"max_new_tokens": 8, "do_sample": False}
    with counted() as calls:
        made = model.generate(**given_to(name), **options, output_logits=True, return_dict_in_generate=True)
    assert calls[0] == LAYERS * 7
    for layer in cross_layers(model).values():
        layer.run_modules()
    due = model.generate(**given_to(name), **options, output_logits=True, return_dict_in_generate=True)
    for one, other in zip(made.logits, due.logits, strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()


def test_a_hook_inside_a_layer_runs_its_modules() -> None:
    model, seen = patched(model_of("bart")), list[int]()
    due = model.generate(**texts(), max_new_tokens=8, do_sample=False)
    layer: Any = next(iter(cross_layers(model).values()))
    handle = layer.fc1.register_forward_hook(lambda *args: seen.append(1))
    with counted() as calls:
        made = model.generate(**texts(), max_new_tokens=8, do_sample=False)
    assert torch.equal(made, due)
    assert (len(seen), calls[0]) == (8, 7 * (LAYERS - 1))
    handle.remove()
    with counted() as calls:
        model.generate(**texts(), max_new_tokens=8, do_sample=False)
    assert calls[0] == 7 * LAYERS


def test_a_changed_weight_and_a_changed_epsilon_are_seen() -> None:
    model, options = patched(model_of("bart")), {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(**texts(), **options)
    layer = model.model.decoder.layers[1]
    with torch.no_grad():
        layer.self_attn.v_proj.weight.data = -layer.self_attn.v_proj.weight.data.clone()
        layer.fc1.weight.mul_(-1)
    layer.final_layer_norm.eps = 0.1
    with counted() as calls:
        made = model.generate(**texts(), **options)
    assert calls[0] == 7 * LAYERS
    assert not torch.equal(made, before)
    for one in cross_layers(model).values():
        one.run_modules()
    assert torch.equal(model.generate(**texts(), **options), made)


def test_a_copy_runs_fused_too() -> None:
    model = patched(model_of("whisper"))
    twin = copy.deepcopy(model)
    with counted() as calls:
        made = twin.generate(**given_to("whisper"), max_new_tokens=8, do_sample=False)
    assert calls[0] == 7 * LAYERS
    assert torch.equal(made, model.generate(**given_to("whisper"), max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("t5", {"dtype": torch.float16}, "its modules clamp float16, and fused layers do not"),
        ("bart", {"activation_function": "laplace"}, "its activation is LaplaceActivation"),
    ],
)
def test_why_a_layer_is_not_fused(name: str, changes: dict[str, Any], reason: str) -> None:
    planned = accelpatch.plan(encoder_decoder(name, **changes), "exact")
    layers = [entry for entry in planned.entries if entry.site.role == "layer"]
    assert len(layers) == LAYERS
    assert {entry.reason for entry in layers} == {reason}


def test_the_plan_for_a_gpu_says_how_many_launches_a_layer_is() -> None:
    for name, launches in (("whisper", 9), ("bart", 12), ("flan-t5", 13)):
        model = encoder_decoder(name, torch.bfloat16)
        planned = accelpatch.plan(model, "exact", device=KNOWN["sm_90"])
        layers = [entry for entry in planned.entries if entry.site.role == "layer"]
        assert len(layers) == LAYERS
        assert all(entry.choice is not None and entry.choice.fused for entry in layers)
        assert {entry.choice.kernel for entry in layers if entry.choice} == {f"hip, {launches} launches"}
