"""How much is verified: all, all in part, the first of each kind, nothing; and of a saved model only once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch import api
from accelpatch.errors import AccelpatchError
from accelpatch.fusion import verified
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Implementation
from accelpatch.patching import threads
from accelpatch.patching.extent import AUTO, FULL, OFF, Extent, first_of_kind, level_of
from tests.support.tiny import CAUSAL, VOCABULARY


def report_of(verify: Any) -> Any:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", verify=verify)
    return model.accelpatch.report()


def measured(report: Any) -> set[str]:
    return {site.path for site in report.sites if site.kernel_error is not None and site.replacer != "fused_layer"}


@pytest.mark.parametrize("given, level", [(True, AUTO), (False, OFF), ("full", FULL), ("off", OFF)])
def test_levels(given: Any, level: str) -> None:
    assert level_of(given) == level


@pytest.mark.parametrize("given", ["yes", None, 1, "FULL"])
def test_another_level_is_refused_before_anything_is_done(given: Any) -> None:
    model = CAUSAL["llama"].make()
    with pytest.raises(AccelpatchError, match="one of auto, full, quick, off") as raised:
        accelpatch.patch(model, "int8", verify=given)
    assert isinstance(raised.value, TypeError)
    assert not hasattr(model, "accelpatch")


def test_auto_checks_each_site_and_quick_the_first_of_each_kind() -> None:
    every, auto, quick = (report_of(level) for level in ("full", True, "quick"))
    assert measured(every) == measured(auto) > measured(quick)
    inside = {path for path in measured(quick) if ".layers." in path}
    assert inside
    assert all(".layers.0." in path for path in inside)
    later = next(site for site in quick.sites if site.path == "model.layers.1.mlp.up_proj")
    assert later.unverified == "its kernel is that of model.layers.0.mlp.up_proj"
    assert (auto.verification.fused_layers, quick.verification.fused_layers) == (2, 1)
    assert not any("not verified" in note for note in quick.notes)
    assert "the first of each kind alone" in str(quick)
    assert auto.verification.kl == quick.verification.kl == every.verification.kl


def test_kinds_are_of_one_shape_and_role() -> None:
    first = first_of_kind(api.plan(CAUSAL["llama"].make(), "int8"))
    assert first["model.layers.1.self_attn.q_proj"] == "model.layers.0.self_attn.q_proj"
    assert first["model.layers.0.mlp.up_proj"] != first["model.layers.0.mlp.gate_proj"]


def test_layers_that_attend_in_another_way_are_another_kind() -> None:
    model = CAUSAL["gemma2"].make()
    accelpatch.patch(model, "int8", verify="quick")
    kinds = {layer.self_attn.sliding_window for layer in model.model.layers}
    assert model.accelpatch.report().verification.fused_layers == len(kinds) == 2


@pytest.mark.parametrize(
    "level, first, own, chosen", [(AUTO, True, True, "abc"), (AUTO, False, True, "b"), (FULL, False, True, "abc"),
                                  (AUTO, False, False, "abc")],
)  # fmt: skip
def test_samples_of_a_site(level: str, first: bool, own: bool, chosen: str) -> None:
    assert Extent(level).chosen("abc", first, own) == chosen
    assert Extent(level).chosen("a", first, own) == "a"


def test_samples_of_the_user_are_all_used() -> None:
    model, seen = CAUSAL["llama"].make(), list[int]()
    inputs = [{"input_ids": torch.full((1, length), 3)} for length in (5, 6, 7)]
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    accelpatch.patch(model, "int8", inputs=inputs)
    assert {5, 6, 7} <= set(seen)
    assert model.accelpatch.report().verification.tokens == 5 + 6 + 7


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8")
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_what_was_verified_before_it_was_saved_is_not_verified_again(saved: Path) -> None:
    found = api.load(str(saved)).model.accelpatch.report()
    assert found.verification.before
    assert found.verification.fused_layers == 1
    assert "the rest before it was saved" in str(found)
    again = api.load(str(saved), verify="full").model.accelpatch.report()
    assert not again.verification.before
    assert again.verification.fused_layers == 2
    assert measured(again) > measured(found)


def test_it_is_where_something_else_computes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["verified"] = "0" * 64
    (saved / "config.json").write_text(json.dumps(config))
    found = api.load(str(saved)).model.accelpatch.report()
    assert not found.verification.before
    assert found.verification.fused_layers == 2


@pytest.mark.parametrize("verify", ["off", "quick"])
def test_what_was_not_verified_is_not_said_to_be(verify: str, tmp_path: Path) -> None:
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", verify=verify)
    model.save_pretrained(tmp_path)
    assert "verified" not in config_of(tmp_path)


def test_a_model_with_a_failed_layer_is_not_saved_as_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "over_bound", lambda errors: "too far")
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8")
    assert model.accelpatch.report().verification.failures
    model.save_pretrained(tmp_path)
    assert "verified" not in config_of(tmp_path)


def test_a_loaded_model_is_saved_as_verified_as_it_was(saved: Path, tmp_path: Path) -> None:
    api.load(str(saved)).model.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again")["verified"] == config_of(saved)["verified"]


@pytest.mark.parametrize("load, fit", [(0.0, 8), (32.0, 8), (48.0, 2), (64.0, 1), (500.0, 1)])
def test_threads_that_find_a_core(load: float, fit: int) -> None:
    assert threads.fitting(8, load, 64) == fit


def test_the_number_of_threads_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before, inside = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    torch.set_num_threads(2)
    try:
        model = CAUSAL["llama"].make()
        handle = model.register_forward_pre_hook(lambda *_: inside.append(torch.get_num_threads()))
        accelpatch.patch(model, "int8")
        assert set(inside) == {1}
        handle.remove()
        model(torch.ones(1, 3, dtype=torch.int64) % VOCABULARY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def wrong(monkeypatch: pytest.MonkeyPatch, changed: Any) -> None:
    """`changed(x, y)` in place of each result y of a packed linear layer for x."""
    kernel = dispatch.kernel("packed_linear")
    for name, real in list(kernel.implementations.items()):

        def run(x: Any, *args: Any, real: Any = real.run) -> Any:
            return changed(x, real(x, *args))

        monkeypatch.setitem(kernel.implementations, name, Implementation(run, real.why_not))


WIDE = CAUSAL["llama"].make().config.intermediate_size


@pytest.mark.parametrize("level", ["auto", "quick", "full"])
def test_where_the_first_of_a_kind_fails_so_do_the_others(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_token_of_down(x: Any, y: Any) -> Any:
        return y + y.abs().max() if x.numel() == x.shape[-1] == WIDE else y

    wrong(monkeypatch, one_token_of_down)
    failed = [site.path for site in report_of(level).sites if site.failed]
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"} <= set(failed)


@pytest.mark.parametrize("channel", [0, 31, 64, 95])
def test_one_wrong_output_of_the_head_is_found(channel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_logit(x: Any, y: Any) -> Any:
        if y.shape[-1] == VOCABULARY:
            y = y.clone()
            y[..., channel] += y.abs().max() / 100
        return y

    wrong(monkeypatch, one_logit)
    assert "lm_head" in [site.path for site in report_of(True).sites if site.failed]


def test_parts_go_round_all_blocks_of_the_sites_of_a_kind() -> None:
    assert [Extent().checked_part(place == 0, place)["first"] % 4 for place in range(1, 6)] == [1, 2, 3, 0, 1]
    assert Extent().checked_part(True, 0)["every"] == 1
    assert Extent(FULL).checked_part(False, 3) == {}


def test_a_file_does_not_say_how_much_is_verified(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] |= {"verify": "off", "progress": 1, "verified": ""}
    (saved / "config.json").write_text(json.dumps(config))
    assert api.load(str(saved)).model.accelpatch.report().verification.fused_layers == 2


def test_another_dtype_is_verified(saved: Path) -> None:
    found = api.load(str(saved), dtype=torch.bfloat16).model.accelpatch.report()
    assert not found.verification.before


def test_an_error_of_the_users_progress_is_no_refusal_of_the_model() -> None:
    def fails(stage: str, done: int, total: int) -> None:
        raise RuntimeError("my own")

    model = CAUSAL["llama"].make()
    with pytest.raises(RuntimeError, match="my own"):
        accelpatch.patch(model, "int8", progress=fails)
    assert not hasattr(model, "accelpatch")
