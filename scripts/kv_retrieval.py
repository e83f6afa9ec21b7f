"""Train a small model to look up a key's value far back, and print how often it does so over a KV cache in 8 bits.

python scripts/kv_retrieval.py [--length 16384] [--needles 200] [--formats int8 fp8] [--device cuda]

Two layers of Llama's form learn to answer a key with the token that followed it once, somewhere in a sequence of random
tokens; sequences become twice as long when it answers 95% rightly, up to `--length`. Then each needle is a key of a new
sequence whose keys and values were computed once in floats, and the question is a step over the cache in each format.
The model is this program's own, so that the float cache finds nearly all: what is missed is the format's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.kv_fidelity import Formats

FILLERS, NAMES, VALUES = range(512), range(512, 768), range(768, 1024)  # tokens
PAIRS, ASKED = 64, 32  # keys of a sequence, with a value each, and those that training asks for
SHORTEST, EVERY = 256, 25  # tokens of the first sequences; steps between two looks at the answers
ENOUGH = 0.95  # of the answers, before sequences become longer


def sequences(count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(ids[count, length], keys[count, PAIRS], values[count, PAIRS]): random tokens with the pairs spread over them."""
    ids = torch.randint(len(FILLERS), (count, length), generator=draw)
    keys = torch.stack([torch.randperm(len(NAMES), generator=draw)[:PAIRS] for _ in range(count)]) + NAMES.start
    values = torch.randint(VALUES.start, VALUES.stop, (count, PAIRS), generator=draw)
    places = torch.stack([torch.randperm(length // 2, generator=draw)[:PAIRS].sort().values * 2 for _ in range(count)])
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    return ids, keys, values


def model_of(length: int) -> LlamaForCausalLM:
    """The untrained model."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VALUES.stop, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2 * length, rope_theta=1e6,
    ))  # fmt: skip


def train(model: Any, longest: int, device: torch.device, most: int, tokens: int) -> int:
    """Train it until it answers sequences of the length `longest`; the steps that this took. tokens: of a step."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    length, right = min(SHORTEST, longest), list[float]()
    for step in range(1, most + 1):
        ids, keys, values = sequences(max(1, tokens // length), length, draw)
        chosen = torch.stack([torch.randperm(PAIRS, generator=draw)[:ASKED] for _ in range(len(ids))])
        asked, due = keys.gather(1, chosen), values.gather(1, chosen)
        whole = torch.cat([ids, torch.stack([asked, due], -1).flatten(1)], 1).to(device)
        states = model.model(input_ids=whole).last_hidden_state[:, length::2]  # those of the keys
        logits, due = model.lm_head(states), due.to(device)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), due.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right.append((logits.argmax(-1) == due).float().mean().item())
        if step % EVERY == 0:
            found, right = sum(right) / len(right), []
            print(
                f"step {step}, {length} tokens: loss {loss.item():.3f}, {found:.1%} right", file=sys.stderr, flush=True
            )
            if found >= ENOUGH and length == longest:
                return step
            length = min(2 * length, longest) if found >= ENOUGH else length
    sys.exit(f"after {most} steps the model does not answer sequences of {length} tokens: give more --steps")


@torch.no_grad()
def found(formats: Formats, length: int, needles: int) -> dict[str, int]:
    """How many of so many needles steps over each format of the cache find."""
    draw, right = torch.Generator().manual_seed(2), dict.fromkeys(formats.runtimes, 0)
    for first in range(0, needles, PAIRS):
        ids, keys, values = sequences(1, length, draw)
        states = formats.prompt(ids.to(formats.device))
        for key, value in list(zip(keys[0], values[0], strict=True))[: needles - first]:
            for name in formats.runtimes:
                formats.use(name)
                answer = formats.step(key.to(formats.device), formats.cache(states)).argmax()
                right[name] += int(answer.item() == value.item())
    return right


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384, help="Tokens of a sequence.")
    parser.add_argument("--needles", type=int, default=200, help="Keys that are asked for.")
    parser.add_argument("--steps", type=int, default=20000, help="Steps of training at most.")
    parser.add_argument("--batch", type=int, default=65536, help="Tokens of a step of training.")
    parser.add_argument("--formats", nargs="+", default=["int8", "fp8"], help="Formats beside a float cache.")
    parser.add_argument("--device", default="cuda", help="Where it runs.")
    parser.add_argument("--dtype", default="bfloat16", help="The dtype of the trained model, once it is asked.")
    asked = parser.parse_args()
    if asked.length < 2 * PAIRS:
        parser.error(f"--length must be at least {2 * PAIRS}: a sequence has {PAIRS} keys with their values")
    device = torch.device(asked.device)
    model = model_of(asked.length).to(device)
    steps = train(model, asked.length, device, asked.steps, asked.batch)
    formats = Formats(model.to(getattr(torch, asked.dtype)).eval(), asked.formats)
    right = found(formats, asked.length, asked.needles)
    print(f"| tokens | needles | {' | '.join('float' if name == 'auto' else name for name in right)} | steps |")
    print("| --- " * (3 + len(right)) + "|")
    print(f"| {asked.length:,} | {asked.needles} | {' | '.join(map(str, right.values()))} | {steps} |")


if __name__ == "__main__":
    main()
