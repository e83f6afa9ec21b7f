"""Train a small model to look up a key's value far back, and print how often it does so over a KV cache in 8 bits.

python scripts/kv_retrieval.py [--length 16384] [--needles 200] [--formats int8 fp8] [--device cuda]
On a CPU: --device cpu --dtype float32 --batch 4096

Two layers of Llama's form learn to answer a key with the token that followed it once, somewhere in a sequence of random
tokens; from 8 tokens with 2 keys on, sequences become twice as long when it answers 95% rightly, up to `--length`; it
is done when it answers 97% of those.
Two attention heads do not start at random, as such a circuit is slow to form: the first layer's looks at the token
before, by its rotary phases, and notes it; the second layer's looks for a token whose note is the asked key. Training
sets everything else, and changes these two as well.
Then each needle is a key of a new sequence whose keys and values were computed once in floats, and the question is a
step over the cache in each format. The model is this program's own, so that the float cache finds nearly all: what is
missed is the format's.
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
PAIRS = 64  # keys of a sequence, with a value each; a quarter of the tokens of a short one at most
SHORTEST, EVERY = 8, 25  # tokens of the first sequences; steps between two looks at the answers
ENOUGH, AT_LAST = 0.95, 0.97  # of the answers, before sequences become longer, and at the length that was asked for
HIDDEN, HEADS, SIZE = 128, 2, 64  # hidden size; attention heads and their size
RATE, WARM = 3e-3, 50  # learning rate, and the steps in which it is reached
CONSTANT, SHARP, FASTEST = 4.0, 8.0, 8  # of every embedding; how peaked the first head is; rotary pairs that it uses


def sequences(count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(ids[count, length], keys[count, P], values[count, P]): random tokens with P pairs spread over them."""
    ids, pairs = torch.randint(len(FILLERS), (count, length), generator=draw), min(PAIRS, length // 4)
    keys = torch.rand(count, len(NAMES), generator=draw).argsort(1)[:, :pairs] + NAMES.start
    values = torch.randint(VALUES.start, VALUES.stop, (count, pairs), generator=draw)
    places = torch.rand(count, length // 2, generator=draw).argsort(1)[:, :pairs].sort(1).values * 2
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    return ids, keys, values


def model_of(length: int) -> LlamaForCausalLM:
    """The untrained model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VALUES.stop, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE, max_position_embeddings=2 * length,
        rope_theta=1e6, initializer_range=HIDDEN**-0.5,
    ))  # fmt: skip
    first_head_looks_back(model)
    second_head_looks_it_up(model)
    return model


@torch.no_grad()
def first_head_looks_back(model: Any) -> None:
    """One head of the first layer attends to the token before.

    Queries and keys are made of an entry that all embeddings have in common, so only positions differ. A query that is
    turned back by a step of its rotary pair's frequency meets the key of the place before it at angle 0.
    """
    embeddings, attention = model.model.embed_tokens.weight.normal_(), model.model.layers[0].self_attn
    embeddings[:, 0] = CONSTANT
    normed = CONSTANT / ((CONSTANT**2 + HIDDEN - 1) / HIDDEN) ** 0.5  # that entry after the norm
    step = model.model.rotary_emb.inv_freq
    size = (SHARP * SIZE**0.5) ** 0.5 / normed * (torch.arange(SIZE // 2) < FASTEST)
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight[:SIZE] = 0
    attention.q_proj.weight[:SIZE, 0] = torch.cat([size * step.cos(), -size * step.sin()])
    attention.k_proj.weight[: SIZE // 2, 0] = size


@torch.no_grad()
def second_head_looks_it_up(model: Any) -> None:
    """One head of the second layer compares a token with the note of the token before that the first layer's wrote."""
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight[:SIZE] = first.v_proj.weight[:SIZE]  # what is noted of a token
    second.k_proj.weight[:SIZE] = first.o_proj.weight[:, :SIZE].T  # where the note lies


def train(model: Any, longest: int, device: torch.device, most: int, tokens: int) -> int:
    """Train it until it answers sequences of the length `longest`; the steps that this took. tokens: of a step."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warming = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM))
    length, right = min(SHORTEST, longest), list[float]()
    for step in range(1, most + 1):
        ids, keys, values = sequences(max(1, tokens // length), length, draw)
        order = torch.rand(keys.shape, generator=draw).argsort(1)
        asked, due = keys.gather(1, order), values.gather(1, order)
        whole = torch.cat([ids, torch.stack([asked, due], -1).flatten(1)], 1).to(device)
        states = model.model(input_ids=whole, use_cache=False).last_hidden_state[:, length::2]  # those of the keys
        logits, due = model.lm_head(states), due.to(device)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), due.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warming.step()
        right.append((logits.argmax(-1) == due).float().mean().item())
        if step % EVERY == 0:
            found, right = sum(right) / len(right), []
            print(
                f"step {step}, {length} tokens: loss {loss.item():.3f}, {found:.1%} right", file=sys.stderr, flush=True
            )
            if found >= AT_LAST and length == longest:
                return step
            length = min(2 * length, longest) if found >= ENOUGH else length
    sys.exit(f"after {most} steps the model does not answer sequences of {length} tokens: give more --steps")


@torch.no_grad()
def found(formats: Formats, length: int, needles: int) -> dict[str, int]:
    """How many of so many needles steps over each format of the cache find."""
    draw, right = torch.Generator().manual_seed(2), dict.fromkeys(formats.runtimes, 0)
    while needles > 0:
        ids, keys, values = sequences(1, length, draw)
        states = formats.prompt(ids.to(formats.device))
        for key, value in list(zip(keys[0], values[0], strict=True))[:needles]:
            for name in formats.runtimes:
                formats.use(name)
                answer = formats.step(key.to(formats.device), formats.cache(states)).argmax()
                right[name] += int(answer.item() == value.item())
        needles -= keys.numel()
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
    if asked.length < SHORTEST:
        parser.error(f"--length must be at least {SHORTEST}: that of the first sequences")
    device = torch.device(asked.device)
    model = model_of(asked.length).to(device)
    steps = train(model, asked.length, device, asked.steps, asked.batch)
    formats = Formats(model.to(getattr(torch, asked.dtype)).eval(), asked.formats)
    right = found(formats, asked.length, asked.needles)
    print(f"| tokens | needles | {' | '.join('float' if name == 'auto' else name for name in right)} | steps |")
    print("| --- " * (3 + len(right)) + "|")
    print(f"| {asked.length:,} | {asked.needles} | {' | '.join(map(str, right.values()))} | {steps} |")
    if any(formats.steps(name) != asked.needles for name in right):
        paths = {name: dict(runtime.paths) for name, runtime in formats.runtimes.items()}
        sys.exit(f"this says nothing: not every question was a step over its cache: {paths}")


if __name__ == "__main__":
    main()
