"""How a manager of continuous batching ends, and what is left of it then in the model and in its copies."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.kernels.cpu.openmp import openmp
from accelpatch.runtime import code_watch
from accelpatch.runtime.code_watch import CODE, CodeWatch
from accelpatch.runtime.continuous.step import CONTINUOUS
from tests.runtime.continuous.test_families import NEW, agrees, options
from tests.runtime.continuous.test_requests import ASKED, made, tokens


def test_a_kept_manager_after_unpatch() -> None:
    """Its calls had no masks, which transformers' own attention needs."""
    model, due = made(), tokens(made(None).generate_batch(ASKED, **options()))
    kept = options() | {"persistent_manager": True}
    model.generate_batch(ASKED, **kept)
    accelpatch.unpatch(model)
    assert tokens(model.generate_batch(ASKED, **kept)) == due
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("recipe", ["exact", "flash"])
def test_unpatching_waits_for_the_managers_end(recipe: str) -> None:
    """Its calls had no masks: the originals' attention would mix the requests."""
    model = made(recipe)
    manager = model.init_continuous_batching(**{key: one for key, one in options().items() if key != "warmup"})
    manager.start()
    with pytest.raises(PatchError, match=r"manager.stop\(\)"):
        accelpatch.unpatch(model)
    for prompt in ASKED:
        manager.add_request(prompt, request_id=str(len(prompt)), max_new_tokens=NEW)
    answers = {one.request_id: one.generated_tokens for one in (manager.get_result(timeout=60) for _ in ASKED)}
    manager.stop(block=False)
    manager.join(0.0)
    accelpatch.unpatch(model)
    named = (model, model.model, *(layer.self_attn for layer in model.model.layers))
    assert {one.config._attn_implementation for one in named} == {"sdpa"}
    assert all(agrees(model, prompt, answers[str(len(prompt))]) for prompt in ASKED)


@pytest.mark.parametrize("recipe", ["exact", "flash"])
def test_a_stop_that_does_not_wait(recipe: str) -> None:
    """The thread goes on for a while; when it has ended, the model has its implementations again by itself."""
    model, entered, over = made(recipe), threading.Event(), threading.Event()
    names = _implementations(model)
    manager = model.init_continuous_batching(**{key: one for key, one in options().items() if key != "warmup"})
    handle = model.model.register_forward_pre_hook(lambda *_: entered.set() or (over.wait(60) and None))
    manager.start()
    manager.add_request(ASKED[0], max_new_tokens=NEW)
    assert entered.wait(60)
    manager.stop(block=False)
    assert manager.is_running()
    assert _implementations(model) != names
    over.set()
    end = time.monotonic() + 60
    while _implementations(model) != names:
        assert time.monotonic() < end
        time.sleep(0.01)
    handle.remove()
    assert not manager.is_running()
    assert tokens(model.generate_batch(ASKED[:2], **options())) == tokens(made().generate_batch(ASKED[:2], **options()))


def _implementations(model: Any) -> set[str]:
    return {one.config._attn_implementation for one in model.modules() if hasattr(one, "config")}


@pytest.mark.parametrize("recipe", ["exact", "flash"])
@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="the model"),
        pytest.param(lambda model: pickle.loads(pickle.dumps(model.config)), id="its configuration, saved"),
    ],
)
def test_a_copy_while_a_manager_runs(recipe: str, copied: Callable[[Any], Any]) -> None:
    """No manager runs the copy: it has the implementations that the model has without one."""
    model = made(recipe)
    due = [one.config._attn_implementation for one in (copy.deepcopy(model), model)]
    with model.continuous_batching_context_manager(**options()) as manager:
        made_meanwhile = copied(model)
        manager.add_request(ASKED[2], max_new_tokens=NEW)
        assert agrees(model, ASKED[2], manager.get_result(timeout=60).generated_tokens)
    if made_meanwhile.__class__ is model.config.__class__:
        assert made_meanwhile._attn_implementation in {"sdpa", due[0]}
        return
    ids = torch.tensor([ASKED[1], ASKED[1]])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        found = [one(ids, attention_mask=mask).logits[:, 3:] for one in (made_meanwhile, model)]
    assert [one.config._attn_implementation for one in (made_meanwhile, model)] == due
    torch.testing.assert_close(*found)
    accelpatch.unpatch(made_meanwhile)
    assert made_meanwhile.config._attn_implementation == "sdpa"


def test_calls_one_after_another_do_not_keep_a_manager_waiting() -> None:
    """Each of two threads ends its call when the other one's has begun: some call runs at every moment."""
    model = made(None)
    code = CodeWatch(model)
    over, entered, entries = threading.Event(), threading.Condition(), list[int]()

    def calling() -> None:
        while not over.is_set():
            with code, entered:
                entries.append(place := len(entries))
                entered.notify_all()
                entered.wait_for(lambda: len(entries) > place + 1, 1.0)

    threads = [threading.Thread(target=calling) for _ in range(2)]
    begin = threading.Thread(target=code.begin, args=("session",), daemon=True)
    for thread in (*threads, begin):
        thread.start()
        time.sleep(0.1)
    begin.join(8.0)
    waits = begin.is_alive()
    over.set()
    for thread in (*threads, begin):
        thread.join()
    assert not waits


def test_steps_without_a_prompt_do_not_look_at_code_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = list[CodeWatch](), CodeWatch.look
    monkeypatch.setattr(CodeWatch, "look", lambda self: (looks.append(self), look(self))[1])
    monkeypatch.setattr(code_watch, "LOOKED", 600.0)
    model = made("exact")
    code = vars(model)[CODE]
    with code.step():
        before = len(looks)
    with code.step():
        assert len(looks) == before, "it has just looked"
    with code:
        assert len(looks) == before + 1
    code._looked -= 600.0
    with code.step():
        assert len(looks) == before + 2
    del looks[:]
    model.generate_batch(ASKED, **options())
    steps = sum(count for path, count in model.accelpatch.report().paths.items() if path.startswith(CONTINUOUS))
    assert 1 <= len(looks) < steps


@pytest.mark.skipif(openmp() is None, reason="torch's OpenMP runtime is not found")
def test_torchs_threads_rest_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU what a manager's thread does between calls runs on that thread alone, and a call gets all threads."""
    model, between, within, threads = made("exact"), list[int](), list[int](), torch.get_num_threads()
    manager = model.init_continuous_batching(**{key: one for key, one in options().items() if key != "warmup"})
    inner = type(manager)._run_generation_loop

    def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        between.append(torch.get_num_threads())
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(type(manager), "_run_generation_loop", loop)
    handle = model.model.norm.register_forward_pre_hook(lambda *_: within.append(torch.get_num_threads()) or None)
    torch.set_num_threads(2)
    try:
        manager.start()
        manager.add_request(ASKED[0], max_new_tokens=NEW)
        assert manager.get_result(timeout=60) is not None
        manager.stop()
    finally:
        torch.set_num_threads(threads)
        handle.remove()
    assert (between, set(within)) == ([1], {2})
