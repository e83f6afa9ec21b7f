"""A LoRA adapter on an int4 model: trained on the float model, then used, switched off and saved on the packed one.

    pip install "accelpatch[peft]"
    python examples/lora_on_int4.py --steps 15 --out my-adapter

The kernels have no gradient: a patched model does not train. So the order is train, then patch; to train on, unpatch.
The adapter stays in float beside the packed weights, under PEFT's own names, and loads anywhere.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model

import accelpatch

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="smollm2-135m")
parser.add_argument("--text", default="Ahoy! The capital of France be Paris, matey.")
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--out", default="my-adapter")
options = parser.parse_args()

loaded = accelpatch.load(options.model)
batch = loaded.tokenizer(options.text, return_tensors="pt")
model = get_peft_model(loaded.model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-3)
for _ in range(options.steps):
    loss = model.train()(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss of the last step: {loss.item():.2f}")

accelpatch.patch(model.eval(), "int4")  # the linear layers under the adapter, in place
with torch.no_grad():
    print(f"int4 with the adapter:    {model(**batch, labels=batch['input_ids']).loss.item():.2f}")
    with model.disable_adapter():
        print(f"int4 without the adapter: {model(**batch, labels=batch['input_ids']).loss.item():.2f}")
model.save_pretrained(options.out)  # the adapter alone
