"""torch.compile of what no fused layer takes: that it runs, gives the same, and is gone after unpatch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import accelpatch
from accelpatch.errors import PlanError, RecipeError
from accelpatch.fusion.cache_name import CACHE
from accelpatch.recipe import recipe as recipes
from accelpatch.runtime import compiled
from tests.support import tiny
from tests.support.small_library import needs_compiler

KEPT = {"name": "kept", "match": {"role": "layer"}, "replace": "keep", "optional": True}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces as torch.compile does, and runs the graphs as they are: no compiler, and a hundredth of the time."""
    stock = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: stock(call, backend="aot_eager"))


def _recipe(*rules: dict[str, Any], **runtime: Any) -> dict[str, Any]:
    return {"extends": "exact", "rules": list(rules), "runtime": {"compile": "default", **runtime}}


def _generated(model: Any) -> Tensor:
    made: Tensor = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, do_sample=False)
    return made


def _patched_parts(model: nn.Module) -> list[str]:
    return [path for path, one in model.named_modules() if compiled.CALL in vars(one)]


@pytest.mark.usefixtures("eager")
def test_a_model_without_fused_layers_is_compiled_as_a_whole() -> None:
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    before, settings = _generated(model), model.generation_config
    assert "compile: default takes the layers that are not fused" in str(accelpatch.plan(model, _recipe(KEPT)))
    accelpatch.patch(model, _recipe(KEPT))
    report = model.accelpatch.report()
    assert "compile: default compiles the model's forward: no layer is fused" in report.notes
    made = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert isinstance(made[CACHE], StaticCache)
    own = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, return_dict_in_generate=True,
                         cache_implementation="dynamic")  # fmt: skip
    assert isinstance(own[CACHE], DynamicCache)
    report.paths.clear()
    assert torch.equal(_generated(model), before)
    assert report.paths["compiled: the model"] == 5  # all but the prompt
    accelpatch.unpatch(model)
    assert model.generation_config is settings
    assert settings.cache_implementation is None
    made = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert isinstance(made[CACHE], DynamicCache)
    assert torch.equal(_generated(model), before)


@pytest.mark.usefixtures("eager")
def test_layers_that_are_not_fused_are_compiled_beside_fused_ones() -> None:
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    ids = torch.tensor([[5, 6, 7, 8]])
    first = {"name": "first", "match": {"name": "model.layers.0"}, "replace": "keep"}
    with torch.no_grad():
        before = model(ids).logits
        accelpatch.patch(model, _recipe(first))
        assert "compile: default compiles 1 layers that are not fused" in model.accelpatch.report().notes
        assert _patched_parts(model) == ["model.layers.0"]
        model.accelpatch.report().paths.clear()
        torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=1e-4, atol=1e-5)
        assert model.accelpatch.report().paths["compiled: a layer"] == 1
    copied = copy.deepcopy(model)
    assert vars(copied.model.layers[0]).get(compiled.CALL) is None  # it would run the original's weights
    accelpatch.unpatch(model)
    assert _patched_parts(model) == []
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.usefixtures("eager")
def test_where_every_layer_is_fused_nothing_is_compiled() -> None:
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    with accelpatch.patched(model, _recipe()):
        assert "compile: default compiles nothing, for every layer is fused" in model.accelpatch.report().notes
        assert _patched_parts(model) == []


class Breaking(nn.Module):
    """A model of no library: one layer that asks the host for a number, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu()
        torch._dynamo.graph_break()
        return self.two(x)


@pytest.mark.usefixtures("eager")
def test_graph_breaks_are_reported() -> None:
    model: Any = Breaking().eval()
    x = torch.randn(4, 16)
    with torch.no_grad():
        before = model(x)
        rules = [{"match": {"class": "Linear"}, "replace": "int8_weight_only"}]
        accelpatch.patch(model, {"rules": rules, "verify": {"bound": 0.1}, "runtime": {"compile": "default"}},
                         inputs=[{"x": x}])  # fmt: skip
        model(x)
        paths = model.accelpatch.report().paths
        assert any(path.startswith("graph break: ") for path in paths), paths
        assert paths["compiled: the model"] >= 1
        accelpatch.unpatch(model)
        assert torch.equal(model(x), before)


def test_what_cannot_be_compiled_runs_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no code for this")

    stock = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: stock(call, backend=refuses))
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    before = _generated(model)
    with accelpatch.patched(model, _recipe(KEPT)):
        assert torch.equal(_generated(model), before)
        (said,) = [path for path in model.accelpatch.report().paths if path.startswith("not compiled: ")]
        assert "the model" in said
        assert "no code for this" in said


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    assert "needs a C++ compiler" in str(accelpatch.plan(model, _recipe(KEPT)))
    with accelpatch.patched(model, _recipe(KEPT)):
        notes = " ".join(model.accelpatch.report().notes)
        assert "compile: default has no effect: torch.compile needs a C++ compiler for a CPU" in notes
        assert not any("static cache" in note for note in model.accelpatch.report().notes)


@pytest.mark.usefixtures("eager")
def test_a_patch_that_fails_leaves_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny.make("Llama", **tiny._LLAMA)
    kind, settings = type(model), model.generation_config

    def fails(*args: Any) -> Any:
        raise RuntimeError("interrupted")

    monkeypatch.setattr("accelpatch.pipeline.whole_model", fails)
    for recipe in (_recipe(KEPT), _recipe({"match": {"name": "model.layers.0"}, "replace": "keep"})):
        with pytest.raises(RuntimeError, match="interrupted"):
            accelpatch.patch(model, recipe)
        assert (type(model), model.generation_config, _patched_parts(model)) == (kind, settings, [])


@needs_compiler
def test_by_inductor_itself() -> None:
    model: Any = Breaking().eval()
    x = torch.randn(4, 16)
    rules = [{"match": {"class": "Linear"}, "replace": "int8_weight_only"}]
    runtime = {"compile": "default", "inductor": {"max_autotune": False}}
    with torch.no_grad():
        recipe = {"rules": rules, "verify": {"bound": 0.1}}
        accelpatch.patch(model, recipe)
        due = model(x)
        accelpatch.unpatch(model)
        accelpatch.patch(model, {**recipe, "runtime": runtime}, verify=False)
        torch.testing.assert_close(model(x), due, rtol=1e-4, atol=1e-5)
        assert model.accelpatch.report().paths["compiled: the model"] == 1


def test_an_option_that_inductor_lacks_is_an_error_of_the_plan() -> None:
    model = tiny.make("Llama", **tiny._LLAMA)
    with pytest.raises(PlanError, match="no option 'max_autotun'; did you mean 'max_autotune'"):
        accelpatch.plan(model, _recipe(inductor={"max_autotun": True}))
    with pytest.raises(PlanError, match=r"torch refuses it .*max_autotune"):
        accelpatch.plan(model, _recipe(inductor={"max_autotune": "yes"}))


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        pytest.param("{compile: fast}", "unknown compile 'fast'", id="mode"),
        pytest.param("{inductor: [a]}", "inductor must be a mapping", id="no mapping"),
        pytest.param("{inductor: {a: [1]}}", "inductor.a must be", id="a list"),
        pytest.param("{tunableop: 3}", "tunableop must be text", id="no path"),
    ],
)
def test_bad_values_are_errors_of_the_recipe(runtime: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipes.parse(f"extends: exact\nruntime: {runtime}")


def test_a_recipe_with_these_keys_comes_back_from_yaml() -> None:
    text = (
        "extends: exact\nruntime: {compile: max-autotune, inductor: {triton.cudagraphs: false, epilogue_fusion: true}}"
    )
    recipe = recipes.parse(text)
    assert recipes.parse(recipes.dump(recipe)) == recipe
    assert recipe.runtime.inductor == {"triton.cudagraphs": False, "epilogue_fusion": True}


def test_where_accelpatch_captures_inductor_does_not() -> None:
    settings = recipes.parse("extends: exact\nruntime: {compile: reduce-overhead}").runtime
    assert compiled.options_of(settings, captured=True)[compiled.CUDAGRAPHS] is False
    assert compiled.options_of(settings, captured=False)[compiled.CUDAGRAPHS] is True


class Stub:
    """Stands for compiled code whose outputs the next call overwrites, as those of inductor's graphs."""

    def __init__(self) -> None:
        self.held = torch.zeros(2)

    def __call__(self, x: Tensor, **others: Any) -> Tensor:
        return self.held.copy_(x)


def test_outputs_of_inductors_graphs_are_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: Stub())
    paths: Counter[str] = Counter()
    run = compiled.Compiled("", nn.Identity().eval(), lambda x, **others: x, {compiled.CUDAGRAPHS: True}, paths)
    with torch.no_grad():
        first, second = run(torch.tensor([1.0, 2.0])), run(torch.tensor([3.0, 4.0]))
        assert first.tolist() == [1.0, 2.0]
        assert second.tolist() == [3.0, 4.0]
        assert paths["compiled: the model"] == 2
        run(torch.tensor([1.0, 2.0]), past_key_values=DynamicCache())  # which would hold such outputs
    assert paths["compiled: the model"] == 2
