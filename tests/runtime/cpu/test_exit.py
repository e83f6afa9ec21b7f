"""The end of native steps: freed once nobody has the cache, and left to the system at the program's exit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import accelpatch
from accelpatch.device import probe
from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.decode_step import DecodeStep
from tests.support.tiny import CAUSAL, full_batch

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
ROOT = Path(__file__).parents[3]
PROGRAM = """
import ctypes, gc, sys, threading, time
from tests.runtime.cpu.test_exit import stepped
model, cache = stepped()
{}
"""
HOLDERS = {
    "a global": "",
    "modules that stay": "for one in list(sys.modules.values()): ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))",
    "a thread": "threading.Thread(target=lambda held: time.sleep(99), args=[cache], daemon=True).start()",
    "no collection": "gc.freeze()",
}


def stepped() -> tuple[Any, Any]:
    model = accelpatch.patch(CAUSAL["llama"].make(), "int8", verify=False)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for ids in (full_batch()["input_ids"], torch.full((3, 1), 5), torch.full((3, 1), 6)):
            model(ids, **{CACHE: cache})
    return model, cache


@pytest.mark.parametrize("holder", HOLDERS)
def test_exit_with_a_cache_alive_is_silent(holder: str) -> None:
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(HOLDERS[holder])]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")


def test_a_step_is_freed_once_when_its_cache_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Any] = []
    free = native_library.native().ap_step_free
    monkeypatch.setattr(native_library.native(), "ap_step_free", lambda handle: (freed.append(handle), free(handle)))
    model, cache = stepped()
    assert any(isinstance(one, DecodeStep) for one in gc.get_objects())
    assert not freed
    del cache
    gc.collect()
    assert len(freed) == 1
    del model
    gc.collect()
    assert len(freed) == 1
