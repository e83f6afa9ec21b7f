"""GGUF files: converted and quantised by llama.cpp, of which llama-cpp-python's source distribution holds a copy.

    python -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 safetensors==0.8.0
    venv/bin/pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-0.3.36.tar.gz
    S=llama_cpp_python-0.3.36/vendor/llama.cpp
    cmake -B build -S $S -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    cmake --build build -j2 -t llama-quantize
    venv/bin/python scripts/make_fixtures/make_gguf.py --source $S --build build

The converter's own LlamaModel writes the float16 file (it permutes the rows of q and k), less its vocabulary;
llama-quantize writes every quantised tensor. Expected weights are ggml's dequantize_row_* on the file's bytes, by the
file's own tensor names and in its order of rows; the logits are transformers' with gguf_file, in float32.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_llama import FOREIGN, logits_of, save_expected, tiny_llama
from transformers import AutoModelForCausalLM

MIXED = ["attn_k=q4_1", "ffn_down=q4_1", "attn_q=q8_0", "ffn_up=q8_0"]
FIXTURES = {
    "gguf-q4_0-q4_1-q8_0": ("small", "Q4_0", MIXED),
    "gguf-q4_k_m": ("superblocks", "Q4_K_M", ["attn_output=q4_0"]),
}
SHOWN_ROWS = 4  # of each tensor whose values are stored: one of each type


def convert(source: Path, folder: Path, target: Path) -> None:
    """By convert_hf_to_gguf.py's own class; a fixture has no vocabulary."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    from conversion import get_model_class

    kind: Any = get_model_class("LlamaForCausalLM")
    kind.set_vocab = lambda self: None
    kind(folder, gguf.LlamaFileType.MOSTLY_F16, target).write()


def quantise(name: str, source: Path, build: Path) -> Path:
    shape, file_type, types = FIXTURES[name]
    folder = FOREIGN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        half, whole = Path(scratch) / "half.gguf", Path(scratch) / "tiny-llama"  # the folder's name is written too
        tiny_llama(shape, torch.float16).save_pretrained(whole)
        convert(source, whole, half)
        options = [word for one in types for word in ("--tensor-type", one)]
        program = build / "bin/llama-quantize"
        subprocess.run([program, *options, half, folder / "model.gguf", file_type, "1"], check=True)
    return folder


def expected_rows(path: Path, build: Path) -> dict[str, torch.Tensor]:
    """GGUF's name -> the first rows[SHOWN_ROWS, in] in float32, of the first tensor of each quantised type."""
    import gguf

    ggml = ctypes.CDLL(os.fspath(build / "bin/libggml-base.so"))
    rows: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for tensor in sorted(gguf.GGUFReader(path).tensors, key=lambda one: one.name):
        kind = tensor.tensor_type.name
        if kind in ("F32", "F16") or kind in seen:
            continue
        seen.add(kind)
        values = torch.empty(min(SHOWN_ROWS, int(tensor.shape[1])), int(tensor.shape[0]))
        data = tensor.data[: len(values)].copy()
        function = getattr(ggml, f"dequantize_row_q{kind[1:]}")
        function(ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(values.numel()))
        rows[tensor.name.removesuffix(".weight")] = values
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="GGUF files written by llama.cpp.")
    parser.add_argument("--source", type=Path, required=True, help="llama.cpp's source.")
    parser.add_argument("--build", type=Path, required=True, help="Its build, which has bin/llama-quantize.")
    arguments = parser.parse_args()
    for name in FIXTURES:
        folder = quantise(name, arguments.source.resolve(), arguments.build.resolve())
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
        made_by = {
            "llama-cpp-python": "0.3.36",
            "transformers": transformers.__version__,
            "weights": f"ggml's dequantize_row_*, the first {SHOWN_ROWS} rows of one tensor of each type",
            "logits": "transformers with gguf_file, float32",
        }
        save_expected(folder, logits_of(model), expected_rows(folder / "model.gguf", arguments.build), made_by)


if __name__ == "__main__":
    main()
