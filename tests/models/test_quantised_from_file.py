"""GPTQ of a checkpoint in its file: memory grows with the new weights, not with the float ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.test_mapped import written
from tests.support.word_tokenizer import WORDS, of_words

SCRIPT = """
import gc, json, sys
from pathlib import Path
from threading import Event, Thread
from accelpatch import api
from accelpatch.recipe import methods
from tests.support.own_memory import anonymous

def quantise(folder):
    recipe = methods.by_method(methods.of_bits(4), "gptq", 4, 64)
    api.quantize(folder, recipe, folder + "-4", data=sys.argv[1], verify=False, progress=False)

def peak(folder):  # bytes of no file beyond those of before, at most
    gc.collect()
    before, done, seen = anonymous(), Event(), [0]
    def watch():
        while not done.wait(0.002):
            seen[0] = max(seen[0], anonymous() - before)
    watching = Thread(target=watch)
    watching.start()
    quantise(folder)
    done.set()
    watching.join()
    return seen[0]

quantise(sys.argv[2])  # what is imported and allocated once belongs to no model
print(json.dumps([peak(folder) for folder in sys.argv[3:]]))
"""
LAYERS, WIDTH = (4, 16), 256


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_peak_grows_with_the_new_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the system
    (text := tmp_path / "text.txt").write_text("".join(f" {place * 37 % WORDS}" for place in range(600)))
    sizes = {}
    for layers in (1, *LAYERS):
        folder = str(tmp_path / str(layers))
        sizes[layers] = written(Path(folder), layers, WIDTH)
        of_words().save_pretrained(folder)
    command = [sys.executable, "-c", SCRIPT, str(text), *(str(tmp_path / str(layers)) for layers in sizes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    few, many = json.loads(done.stdout.splitlines()[-1])
    more = sizes[LAYERS[1]] - sizes[LAYERS[0]]
    assert many - few < 0.75 * more, (few, many, more)
