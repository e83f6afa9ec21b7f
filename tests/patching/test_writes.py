"""A packed weight is read as any tensor, and what is written into it takes effect, rounded to its format."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import accelpatch
from accelpatch.errors import KernelError, PatchError
from tests.support.packed import PATCHES, packed, plain, rounded
from tests.support.simulated import greedy, logits
from tests.support.tiny import full_batch, padded_batch, snapshot

PATH = "model.layers.1.mlp.down_proj"
forms = pytest.mark.parametrize("form", PATCHES)


def _augmented(w: Tensor) -> None:
    w.data += 0.25


def _assigned(w: Tensor) -> None:
    w.data = w.data * 2


def _in_inference_mode(w: Tensor) -> None:
    with torch.inference_mode():
        w.data[:, 3] = 1.5


# Every way of writing is tried on a float tensor too, which says what is due.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data+=": _augmented,
    "data=": _assigned,
    "mul_": lambda w: w.mul_(-1.5),
    "+=": lambda w: w.__iadd__(0.5),
    "copy_": lambda w: w.copy_(torch.linspace(-1, 1, w.numel()).view(w.shape)),
    "setitem": lambda w: w.__setitem__((slice(None), 2), 0.75),
    "row": lambda w: w[1].zero_(),
    "view-of-view": lambda w: w.t()[4:9].view(5, -1)[1:3].neg_(),
    "detached": lambda w: w.detach().add_(1),
    "unbound": lambda w: w.unbind(0)[3].fill_(0.5),
    "chunk": lambda w: w.chunk(2, dim=1)[1].mul_(3),
    "init": lambda w: nn.init.constant_(w, 0.125),
    "out": lambda w: torch.add(torch.ones(w.shape, dtype=w.dtype), 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([2]), torch.ones(1, w.shape[1], dtype=w.dtype)),
    "inference": _in_inference_mode,
}


@torch.no_grad()
def written(write: Callable[[Tensor], Any], weight: Tensor) -> Tensor:
    floats = weight.clone()
    write(floats)
    return floats


@pytest.mark.each_value
@forms
@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect(write: str, form: str) -> None:
    model = packed("mistral", form)
    module = model.get_submodule(PATH)
    before = module.weight.clone()
    due = rounded(module, written(WRITES[write], before))
    assert not torch.equal(due, before)
    with torch.no_grad():
        WRITES[write](module.weight)
    assert torch.equal(module.weight, due)
    assert module.weight.dtype == before.dtype
    x = torch.randn(3, before.shape[1]).to(before.dtype)
    expected = nn.functional.linear(x.double(), due.double())
    assert (module(x).double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_of_a_transposed_weight(form: str) -> None:
    """Conv1D holds [K, N]."""
    model = packed("gpt2", form)
    module = model.transformer.h[0].mlp.c_fc
    due = rounded(module, written(WRITES["setitem"], module.weight))
    module.weight[:, 2] = 0.75
    assert torch.equal(module.weight, due)
    assert module.weight.shape == plain("gpt2").transformer.h[0].mlp.c_fc.weight.shape


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_tied_weight_is_written_for_both(name: str) -> None:
    model = packed(name)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    head.weight.mul_(0)
    assert not table.weight.any()
    assert not logits(model, full_batch()).any()
    table.weight[5] = 1.0
    assert head.weight[5].eq(1).all()
    seen = head.weight
    assert seen.data_ptr() == table.weight.data_ptr(), "tied weights lie in one place while somebody looks"


def test_the_next_token_is_that_of_the_written_weight() -> None:
    """The native step has laid the packs out by then."""
    model, other = packed("mistral"), packed("mistral")
    before = greedy(model, full_batch())
    for one in (model, other):
        with torch.no_grad():
            one.get_submodule(PATH).weight.mul_(-3)
            one.lm_head.weight[:20] *= 2
    after = greedy(model, full_batch())
    assert not torch.equal(after, before)
    assert torch.equal(after, greedy(other, full_batch()))


@forms
def test_what_cannot_take_effect_is_refused_and_changes_nothing(form: str) -> None:
    model = packed("mistral", form)
    module = model.get_submodule(PATH)
    before, output = module.weight.clone(), logits(model, full_batch())

    def of_another_shape() -> None:
        module.weight.data = torch.zeros(3, 3)

    def a_parameter() -> None:
        module.weight = nn.Parameter(torch.zeros_like(before))

    def trained() -> None:
        module.weight.requires_grad_(True)

    for refused in (of_another_shape, a_parameter, trained):
        with pytest.raises(PatchError, match=rf"{PATH}.*accelpatch\.unpatch\(model\)"):
            refused()
        assert torch.equal(module.weight, before)
    with pytest.raises(ValueError, match="with name 'weight'"):
        nn.utils.parametrizations.weight_norm(module)
    if form != "compact":  # NumPy has no bfloat16
        array = module.weight.numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert torch.equal(logits(model, full_batch()), output)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_a_format_cannot_hold(bad: float, form: str) -> None:
    model = packed("mistral", form)
    module = model.get_submodule(PATH)
    before, output = module.weight.clone(), logits(model, full_batch())
    with pytest.raises(KernelError, match="not finite"):
        module.weight[1, 1] = bad
    assert torch.equal(module.weight, before)
    assert torch.equal(logits(model, full_batch()), output)


def test_reading_gives_plain_tensors() -> None:
    module = packed("mistral").get_submodule(PATH)
    before = module.weight.clone()
    saved = io.BytesIO()
    torch.save({"weight": module.weight}, saved)
    saved.seek(0)
    made = [
        module.weight * 2, module.weight.clone(), module.weight.double(), copy.deepcopy(module.weight),
        module.weight @ torch.ones(before.shape[1], 2), torch.load(saved)["weight"], torch.cat([module.weight]),
        nn.Parameter(module.weight.clone()).data,
    ]  # fmt: skip
    for one in made:
        assert type(one) is Tensor
        one.mul_(0)
    assert module.weight.shape == torch.Size(before.shape)
    assert type(module.weight.shape) is torch.Size
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc", "to_mkldnn"])
def test_a_weight_in_another_layout_is_made_of_it_and_takes_its_place_in_no_layer(layout: str) -> None:
    model = packed("llama", "int8")
    module, due = model.get_submodule(PATH), logits(model, full_batch())
    other = getattr(module.weight.detach(), layout)()
    assert torch.equal(other.to_dense(), module.weight)
    with pytest.raises((PatchError, TypeError), match=r"packed and cannot be replaced|cannot assign"):
        module.weight = nn.Parameter(other, requires_grad=False) if layout != "to_mkldnn" else other
    assert torch.equal(logits(model, full_batch()), due)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_unpatch_gives_written_weights_as_they_were_rounded_and_says_so(form: str) -> None:
    model, fresh = packed("mistral", form), plain("mistral")
    module = model.get_submodule(PATH)
    with torch.no_grad():
        module.weight.mul_(2)
    due, output = module.weight.clone(), logits(model, full_batch())
    with pytest.warns(UserWarning, match=f"written while they were packed .{PATH}"):
        accelpatch.unpatch(model)
    assert type(model.get_submodule(PATH)) is nn.Linear
    state, before = model.state_dict(), fresh.state_dict()
    assert torch.equal(state.pop(f"{PATH}.weight"), due)
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    assert (logits(model, full_batch()) - output).norm() / output.norm() < {"int8": 0.05, "fp8": 0.2, "int4": 0.6}[form]


def test_unpatch_of_a_lossless_weight_needs_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = packed("mistral", "compact")
    model.get_submodule(PATH).weight.data *= 1.25
    due = model.get_submodule(PATH).weight.clone()
    accelpatch.unpatch(model)
    assert torch.equal(model.get_submodule(PATH).weight, due)
    assert [str(w.message) for w in recwarn if "packed" in str(w.message)] == []


@forms
def test_a_write_that_changes_nothing_leaves_the_original(form: str) -> None:
    model = plain("mistral", form)
    before = snapshot(model) if form != "compact" else None
    due = {key: value.clone() for key, value in model.state_dict().items()}
    PATCHES[form](model)
    with torch.no_grad():
        model.get_submodule(PATH).weight.mul_(1)
    accelpatch.unpatch(model)
    assert before is None or snapshot(model) == before
    assert all(torch.equal(value, due[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("form", ["int8", "compact"])
def test_a_copy_of_the_model_is_written_alone(form: str) -> None:
    model = packed("mistral", form)
    view = model.get_submodule(PATH).weight  # a view that is alive while the copy is made
    twin = copy.deepcopy(model)
    before = logits(twin, padded_batch())
    view.mul_(0)
    assert not model.get_submodule(PATH).weight.any()
    assert twin.get_submodule(PATH).weight.any()
    assert torch.equal(logits(twin, padded_batch()), before)


def test_a_weight_without_the_compact_form_stays_in_16_bits() -> None:
    model = packed("mistral", "compact")
    module = model.get_submodule(PATH)
    wide = torch.exp2(torch.linspace(-60, 0, module.weight.shape[1])).bfloat16()
    module.weight[3] = wide
    assert module.tiles is None
    assert torch.equal(module.weight[3], wide)
    module.weight.data[3] = 1.0
    assert module.weight[3].eq(1).all()


@forms
def test_a_view_of_numbers_that_the_weight_has_no_more(form: str) -> None:
    model = packed("llama", form)
    module = model.get_submodule(PATH)
    old = module.weight
    state = {name: value * 0.5 for name, value in plain("llama", form).state_dict().items()}
    model.load_state_dict(state)
    due = module.weight.clone()
    with torch.no_grad(), pytest.raises(PatchError, match=f"{PATH}: this view of its weight is out of date"):
        old.add_(1)
    assert torch.equal(module.weight, due)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "prune": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "delete": lambda module: delattr(module, "weight"),
    "train": lambda module: module.weight.requires_grad_(),
    "replace": lambda module: setattr(module, "weight", nn.Parameter(torch.zeros(2, 2))),
}


@forms
@pytest.mark.parametrize("action", REFUSED)
def test_a_refusal_names_the_layer_and_changes_nothing(action: str, form: str) -> None:
    model = packed("llama", form)
    module = model.get_submodule(PATH)
    before, tables = logits(model, full_batch()), list(model.state_dict())
    with pytest.raises(PatchError, match=f"{PATH}: "):
        REFUSED[action](module)
    assert list(model.state_dict()) == tables
    assert not module._forward_pre_hooks
    assert torch.equal(logits(model, full_batch()), before)
    accelpatch.unpatch(model)
    REFUSED[action](model.get_submodule(PATH))
