"""Captured steps in real graphs on a GPU: the tokens of the stock loop over the same patched modules."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.capture import CudaGraph, new_pool
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.tiny import CAUSAL, full_batch, padded_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min-p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "host": {"do_sample": False, "repetition_penalty": 1.3},
}
NEW = 24


def on_gpu(name: str, **options: Any) -> Any:
    return accelpatch.patch(CAUSAL[name].make().cuda(), "exact", verify=False, **options)


def stock(model: nn.Module) -> Any:
    """A copy of the patched model without its runtime."""
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def batch(make: Any) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in make().items()}


@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_of_every_family(name: str) -> None:
    model = on_gpu(name)
    plain = stock(model)
    for make in (full_batch, padded_batch):
        for way, options in WAYS.items():
            results = []
            for runner in (model, plain):
                torch.manual_seed(3)
                results.append(runner.generate(**batch(make), max_new_tokens=NEW, **options))
            assert torch.equal(*results), (make.__name__, way)
    paths = model.accelpatch.report().paths
    assert paths[CAPTURED] == 2 * len(WAYS) * (NEW - 1), paths
    assert not any(path.startswith("stock loop") for path in paths)


def test_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelpatch.runtime.graphs.kv_cache.SMALLEST", 8)
    model = on_gpu("llama")
    made, due = (
        one.generate(**batch(padded_batch), max_new_tokens=60, do_sample=False) for one in (model, stock(model))
    )
    assert torch.equal(made, due)
    assert model.accelpatch.report().paths[CAPTURED] == 59


def one_by_one(model: Any) -> torch.Tensor:
    """Logits [12, B, V] in float64 of single tokens; before each, the rows change places, as in beam search."""
    given, made = batch(padded_batch), []
    cache = model(**given).past_key_values
    for step in range(12):
        cache.reorder_cache(torch.tensor([1, 2, 0], device="cuda"))
        ids = torch.full((3, 1), 7 + step, device="cuda")
        mask = torch.cat([given["attention_mask"].roll(-step - 1, 0), torch.ones(3, step + 1, device="cuda")], 1)
        made.append(model(input_ids=ids, attention_mask=mask.long(), past_key_values=cache).logits[:, -1])
    return torch.stack(made).double()


@torch.no_grad()
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3"])
def test_single_tokens_of_reordered_rows(name: str, hook: bool) -> None:
    model = accelpatch.patch(CAUSAL[name].make().to(torch.bfloat16).cuda(), "exact", verify=False)
    plain, seen = stock(model), []
    exact = one_by_one(copy.deepcopy(plain).float())
    if hook:
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.sum()))
    mine, modules = ((one_by_one(one) - exact).norm() / exact.norm() for one in (model, plain))
    assert mine <= 2 * modules + 2**-8
    assert len(seen) == (13 if hook else 0)
    assert model.accelpatch.report().paths[CAPTURED] == 12


class Asking(nn.Module):
    """A layer that asks the host for a number: no graph can hold it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if float(x.abs().sum()) >= 0 else x


def test_a_model_that_asks_the_host_and_the_next_one() -> None:
    model = CAUSAL["llama"].make().cuda()
    model.model.norm = Asking(model.model.norm)  # a layer would run its modules between captured parts
    accelpatch.patch(model, "exact", verify=False)
    options = {"max_new_tokens": NEW, "do_sample": True}
    for _ in range(2):
        torch.manual_seed(3)
        made = model.generate(**batch(padded_batch), **options)
    assert any(path.startswith("stock loop: Asking.forward is") for path in model.accelpatch.report().paths)
    torch.manual_seed(3)
    assert torch.equal(made, stock(model).generate(**batch(padded_batch), **options))
    other = on_gpu("qwen3")
    torch.manual_seed(3)
    due = stock(other).generate(**batch(padded_batch), **options)
    torch.manual_seed(3)
    assert torch.equal(other.generate(**batch(padded_batch), **options), due)
    assert other.accelpatch.report().paths[CAPTURED] == NEW - 1


def test_threads_on_streams_of_their_own() -> None:
    model = on_gpu("llama")
    inputs = batch(padded_batch)
    due = stock(model).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    wrong: list[int] = []

    def many(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                made = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
                if not torch.equal(made, due):
                    wrong.append(index)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=many, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == []
    assert model.accelpatch.report().paths[CAPTURED] == 15 * (NEW - 1)


def test_unpatching_frees_graphs_and_caches() -> None:
    ids = torch.randint(2, 150, (8, 100), device="cuda")
    reserved = []
    for _ in range(3):
        model = on_gpu("llama", keep_original="cpu")
        model.generate(ids, max_new_tokens=NEW, do_sample=False)
        during = torch.cuda.memory_reserved()
        accelpatch.unpatch(model)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
        assert during > reserved[-1]
    assert reserved[2] <= reserved[1]


def test_a_graph_among_cyclic_garbage_does_not_break_off_a_capture() -> None:
    device, x = torch.device("cuda"), torch.zeros(8, device="cuda")
    graphs = [CudaGraph(lambda: x.add_(1), device, new_pool(device)) for _ in range(3)]
    kept = gc.get_threshold()

    def program() -> None:
        cycle: list[Any] = [graphs.pop()]
        cycle.append(cycle)
        del cycle
        assert len([[] for _ in range(5000)]) == 5000  # a collection would begin here
        x.fill_(3)

    gc.set_threshold(100)
    try:
        graph = CudaGraph(program, device, new_pool(device))
        assert gc.isenabled()
    finally:
        gc.set_threshold(*kept)
    x.zero_()
    graph.replay()
    assert x.tolist() == [3] * 8


@pytest.mark.parametrize("shape", [(64, 65536, 64), (128, 11008, 4096), (7, 4096, 1024), (300, 32768, 128)], ids=str)
def test_a_graph_keeps_its_workspace(shape: tuple[int, int, int]) -> None:
    """cuBLAS's workspaces are dropped by others (torch.compile does), and their memory goes to someone else."""
    device, (m, k, n) = torch.device("cuda", 0), shape
    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
    y = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    graph = CudaGraph(lambda: y.copy_(a @ b), device, new_pool(device))
    graph.replay()
    due = y.clone()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7.0, device=device) for _ in range(128)]
    y.zero_()
    graph.replay()
    assert torch.equal(y, due)
    assert all(bool((one == 7).all()) for one in others)
