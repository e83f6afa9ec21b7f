"""Smoothing groups of every family, against what the models do; and the smoothed float model, which is the same one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.kernels.check import parity
from accelpatch.models.smoothing import smoothing_groups
from accelpatch.quant.smoothing import SiteStatistics
from tests.support.simulated import logits
from tests.support.smoothing import InFloat64, channels_of, eager, hooked, kinds, smoothed, smoothing_of
from tests.support.tiny import CAUSAL, LAYERS, Tiny, full_batch

QKV, GATE_UP = "input_layernorm -> q_proj, k_proj, v_proj", "post_attention_layernorm -> gate_proj, up_proj"
VALUES, UP = "v_proj -> o_proj", "up_proj -> down_proj"
LLAMA = (QKV, VALUES, GATE_UP, UP)
GEMMA = (QKV, VALUES, "pre_feedforward_layernorm -> gate_proj, up_proj", UP)
FUSED_MLP = ("post_attention_layernorm -> gate_up_proj", "gate_up_proj -> down_proj")
COHERE = ("input_layernorm -> q_proj, k_proj, v_proj, gate_proj, up_proj", VALUES, UP)
BY_HEAD = (
    "input_layernorm -> query_key_value",
    "query_key_value -> dense",
    "post_attention_layernorm -> dense_h_to_4h",
)
# what each layer has; of no family, or none that is safe: falcon, gptj, gpt_bigcode
GROUPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "granite", "helium"), LLAMA),
    **dict.fromkeys(("ernie4_5", "gemma", "stablelm"), LLAMA),
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA),
    **dict.fromkeys(("cohere", "cohere2"), COHERE),
    **dict.fromkeys(("gpt_neox", "bloom"), BY_HEAD),
    **dict.fromkeys(("glm", "glm4"), (QKV, VALUES, *FUSED_MLP)),
    "phi3": ("input_layernorm -> qkv_proj", "qkv_proj -> o_proj", *FUSED_MLP),
    "olmo2": (VALUES, UP),
    "gpt2": ("ln_1 -> c_attn", "c_attn -> c_proj", "ln_2 -> c_fc"),
    "phi": ("input_layernorm -> q_proj, k_proj, v_proj, fc1", "v_proj -> dense"),
    "starcoder2": (QKV, VALUES, "post_attention_layernorm -> c_fc"),
    "opt": ("self_attn_layer_norm -> q_proj, k_proj, v_proj", "v_proj -> out_proj", "final_layer_norm -> fc1",
            "fc1 -> fc2"),
    "mixtral": (QKV, VALUES),
    "falcon": (), "gptj": (), "gpt_bigcode": (),
}  # fmt: skip
SMOOTHED = {name: CAUSAL[name] for name, groups in GROUPS.items() if groups}
SMOOTHED["qwen3_moe"] = CAUSAL["qwen3_moe"]
FAMILIES = pytest.mark.parametrize("tiny", [pytest.param(tiny, id=name) for name, tiny in SMOOTHED.items()])


@pytest.mark.parametrize("name", CAUSAL)
def test_each_layer_has_the_groups_of_its_family(name: str) -> None:
    model = CAUSAL[name].make()
    expected = Counter(kind for kind in GROUPS.get(name, ()) for _ in range(LAYERS))
    if name == "qwen3_moe":  # one layer is sparse
        expected = Counter({QKV: 2, VALUES: 2, GATE_UP: 1, UP: 1})
    assert Counter(kinds(model)) == expected
    paths = [path for path, _ in model.named_modules()]
    assert all(path in paths for group in smoothing_groups(model) for path in (group.source, *group.consumers))


VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "opt-norm-after": ("opt", {"do_layer_norm_before": False}, ("v_proj -> out_proj", "fc1 -> fc2")),
    "opt-gelu": ("opt", {"activation_function": "gelu"}, GROUPS["opt"][:3]),
    "bloom-residual-behind-the-norm": (
        "bloom", {"apply_residual_connection_post_layernorm": True}, ("query_key_value -> dense",),
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}, COHERE),
    "gpt_neox-one-after-the-other": ("gpt_neox", {"use_parallel_residual": False}, BY_HEAD),
    "llama-heads-of-another-size": ("llama", {"head_dim": 24}, LLAMA),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}, LLAMA),
    "llama-no-grouped-queries": ("llama", {"num_key_value_heads": 4}, LLAMA),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, LLAMA),
    "phi3-no-grouped-queries": ("phi3", {"num_key_value_heads": 4}, GROUPS["phi3"]),
}  # fmt: skip


@pytest.mark.parametrize("name, changes, expected", [pytest.param(*case, id=one) for one, case in VARIANTS.items()])
def test_configurations_that_change_the_groups(name: str, changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    model = CAUSAL[name].make(**changes)
    assert Counter(kinds(model)) == Counter(kind for kind in expected for _ in range(LAYERS))
    assert_scaled_inputs_and_nothing_else(model)
    assert_the_same_function(model)


@FAMILIES
def test_what_a_source_makes_is_read_by_its_consumers_alone(tiny: Tiny) -> None:
    assert_scaled_inputs_and_nothing_else(tiny.make())


def assert_scaled_inputs_and_nothing_else(model: Any) -> None:
    """Multiply each channel that a source makes by a factor of its own: the consumers' inputs come so multiplied.

    With the consumers' outputs held as they were, the logits must stay: nobody else reads the source.
    """
    eager(model.double())
    batch = full_batch()
    due = logits(model, batch)
    for group in smoothing_groups(model):
        channels, k, rows = channels_of(model, group)
        before, outputs = observed(model, group.consumers, batch)
        s = torch.linspace(0.5, 2, len(rows), dtype=torch.float64)
        seen: dict[str, Tensor] = {}

        def multiply(path: str, rows: Tensor = rows, s: Tensor = s) -> Any:
            def hook(module: Any, args: Any, output: Tensor) -> Tensor:
                output = output.clone()
                output[..., rows] *= s
                return output

            return hook

        def held(path: str, outputs: dict[str, Tensor] = outputs, seen: dict[str, Tensor] = seen) -> Any:
            def hook(module: Any, args: Any, output: Tensor) -> Tensor:
                seen[path] = args[0].clone()
                return outputs[path]

            return hook

        with hooked(model, [group.source], multiply), hooked(model, group.consumers, held):
            after = logits(model, batch)
        for path in group.consumers:
            torch.testing.assert_close(seen[path], before[path] * channels.to_input(s, k), rtol=1e-9, atol=1e-12)
            assert not torch.allclose(seen[path], before[path])
        torch.testing.assert_close(after, due, rtol=1e-12, atol=1e-12)


def observed(model: Any, paths: tuple[str, ...], batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def see(path: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            inputs[path], outputs[path] = args[0].clone(), output.clone()

        return hook

    with hooked(model, paths, see):
        logits(model, batch)
    return inputs, outputs


@FAMILIES
def test_the_smoothed_model_is_the_same_function(tiny: Tiny) -> None:
    assert_the_same_function(tiny.make())


def assert_the_same_function(model: Any) -> None:
    """Factors from 0.01 to 100 in the weights: to the last digits in float64, and as exact as torch in float32."""
    model = eager(model.float())
    found, batch = smoothing_of(model), full_batch()
    spread = torch.cat([one.factors for one in found.values() if one.factors is not None])
    assert spread.min() < 0.05
    assert spread.max() > 50
    with InFloat64():
        exact = logits(smoothed(model, {}, torch.float64), batch)
        torch.testing.assert_close(logits(smoothed(model, found, torch.float64), batch), exact, rtol=1e-9, atol=1e-9)
    plain, ours = logits(model, batch), logits(smoothed(model, found, torch.float32), batch)
    assert (ours - exact).abs().max() <= 4 * parity.torch_error(plain, exact)


@FAMILIES
def test_every_module_of_a_group_gets_its_part(tiny: Tiny) -> None:
    model = tiny.make()
    found = smoothing_of(model)
    for group in smoothing_groups(model):
        divisors = found[group.source].divisors
        assert divisors is not None
        channels, k, rows = channels_of(model, group)
        others = torch.ones(len(divisors), dtype=torch.bool)
        others[rows] = False
        assert bool((divisors[others] == 1).all())
        for path in group.consumers:
            factors = found[path].factors
            assert factors is not None
            assert factors.equal(channels.to_input(divisors[rows], k))


def test_a_weight_takes_factors_and_divisors_in_both_directions() -> None:
    weight, bias = torch.randn(6, 4), torch.randn(6)
    one = SiteStatistics(None, torch.tensor([0.5, 1, 2, 4]), torch.tensor([1.0, 2, 3, 4, 5, 6]))
    x = torch.randn(3, 4)
    got = one.smoothed_input(x) @ one.weight(weight).t() + one.vector(bias)
    torch.testing.assert_close(got, one.smoothed_output(x @ weight.t() + bias))
    assert SiteStatistics().weight(weight) is weight
    assert SiteStatistics().smoothed_input(x) is x
    assert SiteStatistics().smoothed_output(x) is x


def test_a_model_of_no_family_is_planned_without_groups() -> None:
    plan = accelpatch.plan(CAUSAL["gptj"].make(), "smoothquant")
    assert plan.groups == ()
    assert not plan.calibrates
    assert "calibrate is set and has no effect here" in str(plan)
