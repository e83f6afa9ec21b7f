"""What makes a fused layer of an encoder run its modules, or read its weights anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.fusion.verified_encoders import encoder_layers
from tests.fusion.test_encoders import LAYERS, close, counted, inputs_of, model_of, patched, run


def _with_hook(model: Any, inputs: dict[str, Any]) -> None:
    model.encoder.layer[1].attention.self.register_forward_hook(lambda *given: None)


def _with_gradients(model: Any, inputs: dict[str, Any]) -> None:
    torch.set_grad_enabled(True)


def _in_training(model: Any, inputs: dict[str, Any]) -> None:
    model.train()


def _with_dropout_on(model: Any, inputs: dict[str, Any]) -> None:
    model.encoder.layer[1].output.dropout.train()


def _as_a_replica(model: Any, inputs: dict[str, Any]) -> None:
    vars(model.encoder.layer[1])["_is_replica"] = True


class Doubled(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _with_a_norm_of_ones_own(model: Any, inputs: dict[str, Any]) -> None:
    model.encoder.layer[1].output.LayerNorm = Doubled(64)
    model.double().float()  # weights are read anew


def _with_another_child(model: Any, inputs: dict[str, Any]) -> None:
    old = model.encoder.layer[1].intermediate.dense
    model.encoder.layer[1].intermediate.dense = nn.Sequential(old)


@pytest.mark.parametrize(
    ("change", "fused"), [(_with_hook, 2), (_with_gradients, 0), (_in_training, 0), (_with_another_child, 2),
     (_with_dropout_on, 2), (_as_a_replica, 2), (_with_a_norm_of_ones_own, 2)],
    ids=lambda one: one.__name__.strip("_") if callable(one) else "",
)  # fmt: skip
def test_what_runs_the_modules(change: Callable[..., None], fused: int) -> None:
    model, inputs = patched("bert"), inputs_of("bert")
    try:
        with torch.set_grad_enabled(False), counted() as calls:
            change(model, inputs)
            model(**inputs)
    finally:
        torch.set_grad_enabled(True)
    assert calls == [fused]


def test_gradients_are_stock() -> None:
    model, inputs = model_of("bert"), inputs_of("bert")
    model(**inputs)[0].square().sum().backward()
    due = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    accelpatch.patch(model, "exact")
    model(**inputs)[0].square().sum().backward()
    assert all(close(one.grad, due[name]) for name, one in model.named_parameters() if one.grad is not None)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_weights_that_changed_are_read_anew(kind: str) -> None:
    model, inputs = patched(kind), inputs_of(kind)
    layer = next(iter(encoder_layers(model).values()))
    weight = layer.get_submodule(layer.form.qkv[1]).weight
    with torch.no_grad():
        weight.mul_(1.5)  # in place: the fused layer has a view of the same memory
        layer.get_submodule(layer.form.up).weight.data = layer.get_submodule(layer.form.up).weight * 0.5
    model.to(torch.float64).to(torch.float32)  # moves every weight
    with counted() as calls:
        found = run(model, inputs)
    assert calls == [LAYERS]
    accelpatch.unpatch(model)
    kept = inputs.get("attention_mask", torch.ones(found[0].shape[:2])).bool()
    assert close(found[0][kept], run(model, inputs)[0][kept])


def test_layers_are_fused_again_after_hidden_states_were_asked_for() -> None:
    model, inputs = patched("bert"), inputs_of("bert")
    run(model, inputs, output_hidden_states=True)  # transformers leaves its hooks on the layers
    with counted() as calls:
        run(model, inputs)
    assert calls == [LAYERS]


def test_an_epsilon_that_changes_is_used() -> None:
    model, stock, inputs = patched("vit"), model_of("vit"), inputs_of("vit")
    for one in (model, stock):
        next(part for part in one.modules() if type(part).__name__.endswith("ViTLayer")).layernorm_after.eps = 0.5
    assert close(run(model, inputs)[0], run(stock, inputs)[0])


def test_weights_stay_trainable_after_inference_mode() -> None:
    model, inputs = patched("bert"), inputs_of("bert")
    model.double().float()
    with torch.inference_mode():
        model(**inputs)
    accelpatch.unpatch(model)
    model.train()(**inputs)[1].sum().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad is not None


def test_compiled_without_a_break() -> None:
    model, inputs = patched("vit"), inputs_of("vit")
    due = run(model, inputs)[0]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert close(run(compiled, inputs)[0], due)
