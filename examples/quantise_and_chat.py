"""Quantise a model in place and chat with it; an empty line ends the conversation.

    python examples/quantise_and_chat.py
    python examples/quantise_and_chat.py MODEL --recipe int4 --device cuda

MODEL is a name of the hub, a folder, a GGUF file or a short name of accelpatch's. `accelpatch chat` does more.
"""

import argparse

from transformers import TextStreamer

import accelpatch

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--recipe", default="int8")
parser.add_argument("--device", default="cpu")
parser.add_argument("--tokens", type=int, default=200, help="the most that one answer has")
options = parser.parse_args()

loaded = accelpatch.load(options.model, device=options.device)
model, tokenizer = accelpatch.patch(loaded.model, options.recipe), loaded.tokenizer
report = model.accelpatch.report()
print(f"{report.replaced} modules replaced; failures of verification: {report.verification.failures or 'none'}")

messages = []
while line := input("> "):
    messages.append({"role": "user", "content": line})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(**inputs, max_new_tokens=options.tokens, streamer=streamer)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
