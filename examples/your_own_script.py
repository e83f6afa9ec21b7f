"""A script of transformers that knows nothing of accelpatch. It runs faster without a change:

    accelpatch exec --recipe int8 examples/your_own_script.py --prompt "What is the capital of France?"

exec runs it as python does, with its own arguments. Each of its models is patched before its first forward or generate,
in that process alone; a summary at the end, on stderr, says what was patched and what was left, and why.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--prompt", default="What is the capital of France?")
parser.add_argument("--tokens", type=int, default=40)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model).to(device).eval()
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": options.prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
).to(device)
output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
