"""Run a checkpoint that somebody else quantised (GPTQ, AWQ, bitsandbytes, compressed-tensors), as it is stored.

    python examples/gptq_checkpoint.py DIR --prompt "The sea is"

DIR is its folder, with config.json and its safetensors. No package that wrote it is needed, and nothing is rounded
again: codes, scales and zero points are those of the file. What is read: docs/checkpoints.md.
"""

import argparse

from transformers import AutoTokenizer

import accelpatch

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--tokenizer", help="where the folder has none")
parser.add_argument("--device", default="cpu")
parser.add_argument("--prompt", default="The sea is")
parser.add_argument("--tokens", type=int, default=40)
options = parser.parse_args()

loaded = accelpatch.load(options.folder, device=options.device)
model, tokenizer = loaded.model, loaded.tokenizer or AutoTokenizer.from_pretrained(options.tokenizer)
print(model.accelpatch.report())

inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
