"""Models without a row in the family table, split among two ranks by transformers' tp_plan."""

from __future__ import annotations

import pytest

from accelpatch.parallel.tensor_parallel import split
from accelpatch.recipe.recipe import parse
from tests.parallel.test_tensor_parallel import assert_like_the_whole
from tests.support import ranks
from tests.support.planned import PLANNED, planned


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> ranks.Ended:
    return ranks.run(tmp_path_factory.mktemp("ranks"), [("by_plan", 2)])["by_plan"]


@pytest.mark.parametrize("name", [*PLANNED, "int8"])
def test_like_the_whole(ended: ranks.Ended, name: str) -> None:
    assert ended.statuses == [0, 0], ended.errors
    assert_like_the_whole(ended.results, name)
    for rank, one in enumerate(ended.results):
        report = one[name]["report"]
        assert f"tensor parallel: rank {rank} of 2 (gloo) has " in report
        assert f"rows {32 * rank} to {32 * rank + 31} of self_attn.q_proj" in report
        assert f"columns {48 * rank} to {48 * rank + 47} of mlp." in report


@pytest.mark.parametrize("case, why", [
    ("unknown", "model.layers.0.mlp.up_proj is sequence_parallel; known are colwise and rowwise linear layers"),
    ("module", "model.layers.0.input_layernorm is colwise, and a SeedOssRMSNorm is no nn.Linear"),
    ("alone", "model.layers.0.mlp has no rowwise layer"),
    ("parameters", "the parameters model.layers.*.mlp.up_proj.weight are packed_colwise, which is not known here"),
])  # fmt: skip
def test_what_a_plan_may_not_have(ended: ranks.Ended, case: str, why: str) -> None:
    for one in ended.results:
        assert f"SeedOssForCausalLM cannot be split among ranks by its tp_plan: {why}" in one[case]
        assert one["whole"]


@pytest.mark.parametrize("world, why", [
    (4, "num_key_value_heads, 2, is no multiple of 4"),
    (3, "the 64 outputs or inputs of model.layers.0.self_attn.q_proj are no multiple of 3"),
])  # fmt: skip
def test_ranks_that_do_not_divide_it(world: int, why: str) -> None:
    with pytest.raises(Exception, match=f"by its tp_plan: {why}"):
        split(planned("SeedOss"), parse("extends: exact\n"), None, 0, world)


def test_without_a_plan() -> None:
    model = planned("SeedOss")
    model._tp_plan = {}
    with pytest.raises(Exception, match="no causal model of the family table, and has no tp_plan"):
        split(model, parse("extends: exact\n"), None, 0, 2)
