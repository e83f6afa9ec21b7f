"""Requests of a patched model with a LoRA adapter have the one that is active; a request names none."""

from __future__ import annotations

import accelpatch
from tests.runtime.continuous.test_families import agrees, options, prompts
from tests.support.lora import adapted
from tests.support.tiny import CAUSAL


def test_the_active_adapter_counts(machine: str) -> None:
    whole = adapted(accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False))
    model, asked = whole.get_base_model(), prompts(5, 12, 3)
    found = []
    for name in ("default", "other", "default"):
        if name not in whole.peft_config:
            whole.add_adapter(name, whole.peft_config["default"])
        whole.set_adapter(name)
        done = [one.generated_tokens for one in model.generate_batch(asked, **options()).values()]
        assert all(agrees(model, prompt, answer) for prompt, answer in zip(asked, done, strict=True))
        found.append(done)
    assert found[0] == found[2] != found[1]


def test_an_adapter_for_one_request_is_refused() -> None:
    model = adapted(accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)).get_base_model()
    with model.continuous_batching_context_manager(**options()) as manager:
        manager.add_request(prompts(5)[0], max_new_tokens=3, adapter_name="default")
        result = manager.get_result(timeout=60)
    assert "adapter_name" in str(result.error)
