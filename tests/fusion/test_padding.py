"""Batches of unequal lengths through fused encoder layers, without their padding."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

import accelpatch
from accelpatch.fusion.encoder_layer import FusedEncoder
from accelpatch.fusion.packed_rows import present
from accelpatch.runtime.generation.patched_model import RUNTIME, WITHOUT_PADDING
from tests.fusion.test_encoders import close, model_of, patched, run

LENGTHS = (12, 1, 7, 3)
TEXT = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")


def batch(lengths: tuple[int, ...] = LENGTHS, left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.randint(3, 90, mask.shape, generator=generator), "attention_mask": mask}


def removed(model: Any) -> int:
    """Calls that ran without padding."""
    return int(vars(model)[RUNTIME].paths[WITHOUT_PADDING])


def both(kind: str, inputs: Mapping[str, Any], **more: Any) -> tuple[Any, Any, int]:
    """Stock outputs, patched outputs, and how many patched calls ran without padding."""
    due, model = run(model_of(kind), inputs, **more), patched(kind)
    before = removed(model)
    return due, run(model, inputs, **more), removed(model) - before


@pytest.mark.parametrize("kind", TEXT)
def test_tokens_are_stock_and_padding_is_zero(kind: str) -> None:
    inputs = batch()
    due, found, calls = both(kind, inputs)
    kept = inputs["attention_mask"].bool()
    assert calls == 1
    assert found[0].shape == due[0].shape
    assert close(found[0][kept], due[0][kept])
    assert not found[0][~kept].any()


def test_a_mask_with_holes() -> None:
    inputs = batch()
    inputs["attention_mask"][0, 4] = inputs["attention_mask"][2, 3] = 0
    kept = inputs["attention_mask"].bool()
    due, found, calls = both("bert", inputs)
    assert calls == 1
    assert close(found[0][kept], due[0][kept])


def test_fewer_rows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, own = patched("bert"), list[int](), FusedEncoder.__call__

    def seen(self: FusedEncoder, x: Tensor, attend: Any) -> Tensor:
        rows.append(len(x))
        return own(self, x, attend)

    monkeypatch.setattr(FusedEncoder, "__call__", seen)
    run(model, batch())
    assert rows == [sum(LENGTHS)] * 3


NO_PADDING: Mapping[str, Callable[[dict[str, Tensor]], Any]] = {
    "an empty sentence": lambda inputs: inputs["attention_mask"][1].zero_(),
    "a first token that is padding": lambda inputs: inputs["attention_mask"][2, 0].zero_(),
    "no padding": lambda inputs: inputs["attention_mask"].fill_(1),
    "hardly any": lambda inputs: (inputs["attention_mask"].fill_(1), inputs["attention_mask"][1, -1].zero_()),
    "no mask": lambda inputs: inputs.pop("attention_mask"),
    "hidden states": lambda inputs: inputs.update(output_hidden_states=True),  # type: ignore[call-overload]
    "attentions": lambda inputs: inputs.update(output_attentions=True),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("case", NO_PADDING)
def test_what_keeps_padding_is_stock_everywhere(case: str) -> None:
    inputs = batch()
    NO_PADDING[case](inputs)
    stock = model_of("bert")
    stock.set_attn_implementation("eager")  # type: ignore[operator]
    due = run(stock, inputs)
    model = model_of("bert")
    model.set_attn_implementation("eager")  # type: ignore[operator]
    accelpatch.patch(model, "exact")
    before = removed(model)
    found = run(model, inputs)
    assert removed(model) == before
    assert close(found[0], due[0])
    for one, other in zip(found.hidden_states or (), due.hidden_states or (), strict=True):
        assert close(one, other)


@pytest.mark.parametrize("where", ["encoder.layer.1", "encoder.layer.2.output", "encoder.layer.0.attention.self.query"])
def test_hooks_inside_see_padded_shapes(where: str) -> None:
    model, shapes = patched("bert"), []
    model.get_submodule(where).register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
    before = removed(model)
    run(model, batch())
    assert removed(model) == before
    assert [tuple(shape[:2]) for shape in shapes] == [(4, 12)]


@pytest.mark.parametrize("kind", ["mpnet", "modernbert", "clip-text"])
def test_other_forms_keep_their_padding(kind: str) -> None:
    inputs = batch()
    due, found, calls = both(kind, inputs)
    kept = inputs["attention_mask"].bool()
    assert calls == 0
    assert close(found[0][kept], due[0][kept])


def test_the_recipe_keeps_padding(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nextends: exact\nruntime: {padding: keep}\n")
    model, inputs = model_of("bert"), batch()
    due = run(model, inputs)
    accelpatch.patch(model, str(recipe))
    assert close(run(model, inputs)[0], due[0])
    assert removed(model) == 0


def test_classifiers_and_their_losses_are_stock() -> None:
    torch.manual_seed(0)
    config = t.BertConfig(vocab_size=99, hidden_size=64, num_attention_heads=4, intermediate_size=128,
                          num_hidden_layers=2, num_labels=3)  # fmt: skip
    model = t.BertForSequenceClassification(config).eval()
    inputs = batch() | {"labels": torch.tensor([0, 2, 1, 1])}
    due = run(model, inputs)
    accelpatch.patch(model, "exact")
    before = removed(model)
    found = run(model, inputs)
    assert removed(model) == before + 1
    assert close(found.logits, due.logits)
    assert close(found.loss, due.loss)


def test_labels_of_each_token_keep_padding() -> None:
    torch.manual_seed(0)
    config = t.BertConfig(vocab_size=99, hidden_size=64, num_attention_heads=4, intermediate_size=128,
                          num_hidden_layers=2, num_labels=3)  # fmt: skip
    model = t.BertForTokenClassification(config).eval()
    inputs = batch() | {"labels": torch.randint(0, 3, (4, 12))}  # padded places count, as in stock
    due = run(model, inputs)
    accelpatch.patch(model, "exact")
    assert close(run(model, inputs).loss, due.loss)


def test_an_error_inside_leaves_no_packing_behind() -> None:
    model = patched("bert")
    inputs = batch()
    with pytest.raises(Exception, match=r"index|shape|range"):
        run(model, inputs | {"token_type_ids": torch.full((4, 12), 99)})
    assert present() is None
    assert run(model, inputs)[0].shape == (4, 12, 64)


def test_threads_and_copies() -> None:
    model, inputs = patched("bert"), batch()
    due, twin, found = run(model, inputs)[0], copy.deepcopy(model), list[Tensor]()
    threads = [threading.Thread(target=lambda: found.append(run(twin, inputs)[0])) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 4
    assert all(torch.equal(one, due) for one in found)
    assert removed(twin) == 4


class Chunked(torch.nn.Module):
    """A model of one's own that gives BERT other rows than it was given."""

    def __init__(self, bert: Any):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        made: Tensor = self.bert(input_ids.view(-1, 6), attention_mask.view(-1, 6)).last_hidden_state
        return made.view(*input_ids.shape, -1)


def test_models_of_ones_own_keep_their_padding() -> None:
    model, inputs = Chunked(model_of("bert")).eval(), batch((12, 7, 12, 7))
    due = run(model, inputs)
    accelpatch.patch(model, "exact")
    assert close(run(model, inputs)[inputs["attention_mask"].bool()], due[inputs["attention_mask"].bool()])


def _fewer_layers(model: Any) -> None:
    model.encoder.layer = model.encoder.layer[:2]


def _a_stock_layer(model: Any) -> None:
    model.encoder.layer[1] = model_of("bert").encoder.layer[1]  # type: ignore[index, union-attr]


def _one_layer_twice(model: Any) -> None:
    model.encoder.layer[2] = model.encoder.layer[1]


def _a_hook_that_changes_the_mask(model: Any) -> None:
    def change(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": None}

    model.encoder.register_forward_pre_hook(change, with_kwargs=True)


def _another_attention(model: Any) -> None:
    t.AttentionInterface.register("halved", lambda *given, **more: (0.5 * sdpa(*given, **more)[0], None))
    t.AttentionMaskInterface.register("halved", t.masking_utils.sdpa_mask)
    model.set_attn_implementation("halved")


def sdpa(*given: Any, **more: Any) -> Any:
    return t.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](*given, **more)


@pytest.mark.parametrize(
    "change", [_fewer_layers, _a_stock_layer, _one_layer_twice, _a_hook_that_changes_the_mask, _another_attention]
)
def test_changes_after_the_patch(change: Callable[[Any], None]) -> None:
    inputs, stock, model = batch(), model_of("bert"), patched("bert")
    change(stock)
    change(model)
    due, found, kept = run(stock, inputs)[0], run(model, inputs)[0], inputs["attention_mask"].bool()
    assert found.shape == due.shape
    assert close(found[kept], due[kept])


@pytest.mark.parametrize("shape", [(4, 15), (4, 8)], ids=["wider", "narrower"])
def test_a_mask_of_another_shape_is_stocks_error(shape: tuple[int, int]) -> None:
    mask = torch.ones(shape, dtype=torch.long)
    mask[:, 4:] = 0
    inputs = batch() | {"attention_mask": mask}
    for model in (model_of("bert"), patched("bert")):
        with pytest.raises(Exception, match=r"shape|size|expand"):
            run(model, inputs)


def test_moves_beside_calls() -> None:
    model, inputs, right = patched("bert"), batch(), list[bool]()
    kept = inputs["attention_mask"].bool()
    due = run(model, inputs)[0][kept]

    def both() -> None:
        for _ in range(20):
            model.to("cpu")
            right.append(close(run(model, inputs)[0][kept], due))

    threads = [threading.Thread(target=both) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert right == [True] * 80
