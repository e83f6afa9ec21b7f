"""Float weights that are loaded on a CPU in their own dtype stay in their file, which may be larger than memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = """
import json, re, sys
from pathlib import Path
from accelpatch.models import load

def anonymous():  # bytes that no file holds; pages of files are dropped where memory is short
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

load.load(sys.argv[1])  # what is imported and allocated once belongs to no model
before = anonymous()
models = [load.load(sys.argv[2], dtype=dtype).model for dtype in sys.argv[3:]]
total = sum(float(one.float().sum()) for model in models for one in model.parameters())  # all of it is read
print(json.dumps(anonymous() - before))
"""


def written(folder: Path, layers: int, width: int) -> int:
    """Write a model in bfloat16; the bytes of its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return sum(one.nbytes for one in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("dtype", "mapped"), [("auto", True), ("bfloat16", True), ("float32", False)])
def test_weights_stay_in_their_file(dtype: str, mapped: bool, tmp_path: Path) -> None:
    written(tmp_path / "small", 1, 64)
    size = written(tmp_path / "large", 12, 512)
    arguments = [str(tmp_path / "small"), str(tmp_path / "large"), dtype]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert (taken < 0.3 * size) == mapped, (taken, size)
