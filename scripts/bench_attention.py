"""Times decode_attention against torch's own attention and the read limit, over a static cache; parity comes first.

    python scripts/bench_attention.py [--kv-heads 32 8] [--batches 1 8] [--contexts 128 1024 4096 16384] [--limit 4.49]

Medians of graph replays and their spread; caches rotate beyond L2. Ours turns q and k and writes the new k and v
besides; torch's gets q ready and the cache as it is. Of torch's backends the fastest counts, heads shared where it can;
"as called" is the one that scaled_dot_product_attention takes by itself. "us" is a launch among others like it, which
may begin before the one before it ends; "us alone" is what it adds to a kernel of torch's before it that lets nothing
begin early.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import measure_replays
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check import attention_check
from accelpatch.kernels.hip import binding
from accelpatch.kernels.ops.attention import decode_attention

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BEYOND_L2 = 600 << 20  # bytes of caches in rotation: a graph's first launch, which overlaps with none, is one of many
LEAST, MOST = 4, 200  # of them
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Step:
    """One layer's attention in a decode step; a share of the limit counts the bytes of the cache that it reads."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    size: int
    tokens: int

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.context * self.size * DTYPE.itemsize


def a_call(work: Callable[[], object], count: int, repeats: int) -> tuple[float, float]:
    """Median of a graph's replays over `count`, and their spread (max - min over median)."""
    taken = measure_replays(work, repeats)
    return taken.median / count, taken.spread


class Caches:
    """Rotating caches of a step, the last `tokens` slots of `context` to be written, and what else a call takes."""

    def __init__(self, step: Step, kernel: Callable[..., Tensor]):
        capacity = -(-step.context // 256) * 256
        size = 2 * step.batch * step.kv_heads * capacity * step.size * DTYPE.itemsize
        options = {"device": DEVICE, "dtype": DTYPE}
        self.kernel, self.step, self.count = kernel, step, max(LEAST, min(MOST, -(-BEYOND_L2 // size)))
        self.held = [
            torch.randn(2, step.batch, step.kv_heads, capacity, step.size, **options) for _ in range(self.count)
        ]
        frequencies = 10000 ** (-torch.arange(0, step.size, 2, device=DEVICE) / step.size)
        self.shape = AttentionShape(step.heads, step.kv_heads, step.size, step.size**-0.5, frequencies)
        self.qkv = torch.randn(step.batch * step.tokens, self.shape.columns, **options)
        first = step.context - step.tokens
        self.slot = torch.tensor([first], device=DEVICE)
        self.positions = (first + torch.arange(step.tokens, device=DEVICE)).repeat(step.batch, 1)
        self.mask = torch.ones(step.batch, capacity, dtype=torch.int64, device=DEVICE)

    def ours(self, keys: Tensor, values: Tensor) -> Tensor:
        with binding.weight_prefetch():
            return self.kernel(self.qkv, self.positions, self.slot, self.mask, keys, values, self.shape)

    def all_ours(self) -> None:
        for keys, values in self.held:
            self.ours(keys, values)

    def all_after_another(self) -> None:
        """Each after a kernel that makes qkv and lets nothing begin early."""
        for keys, values in self.held:
            self.qkv.mul_(1.0)
            self.ours(keys, values)

    def only_the_others(self) -> None:
        for _ in self.held:
            self.qkv.mul_(1.0)

    def all_torch(self, backend: SDPBackend | None) -> None:
        """By a backend, or by the one that torch chooses."""
        step, group = self.step, self.step.heads // self.step.kv_heads
        q = self.qkv[:, : step.heads * step.size].view(step.batch, step.tokens, step.heads, step.size).transpose(1, 2)
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            for keys, values in self.held:
                k, v = keys[:, :, : step.context], values[:, :, : step.context]
                if group > 1 and backend is SDPBackend.EFFICIENT_ATTENTION:
                    k, v = (one[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for one in (k, v))
                functional.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != step.heads)


def check(caches: Caches) -> None:
    """The float rule against float32 throughout."""
    rest = (caches.positions, caches.slot, caches.mask)
    keys, values = caches.held[0]
    due = decode_attention.reference_(caches.qkv.float(), *rest, keys.float(), values.float(), caches.shape)
    plain = decode_attention.reference_(caches.qkv, *rest, keys.clone(), values.clone(), caches.shape)
    for _ in range(3):
        mine = caches.ours(keys, values)
        errors = [(one.float() - due).abs().max().item() for one in (plain, mine)]
        assert errors[1] <= 2 * errors[0] + torch.finfo(DTYPE).eps * due.abs().max().item(), (caches.step, errors)


def torch_times(caches: Caches, repeats: int) -> Iterator[tuple[float, str]]:
    for name, backend in BACKENDS.items():
        try:
            yield a_call(lambda backend=backend: caches.all_torch(backend), caches.count, repeats)[0], name
        except RuntimeError as error:  # a backend that does not take this shape has no time
            print(f"  {name}: {str(error).splitlines()[0]}", flush=True)


def show(step: Step, options: argparse.Namespace, limit: float) -> None:
    """A line for a step."""
    caches = Caches(step, attention_check.IMPLEMENTATIONS[options.kernel])
    best, backend = min(torch_times(caches, options.repeats)) if options.torch else (0.0, "")
    called = a_call(lambda: caches.all_torch(None), caches.count, options.repeats)[0] if options.torch else 0.0
    check(caches)
    ours, spread = a_call(caches.all_ours, caches.count, options.repeats)
    after = a_call(caches.all_after_another, caches.count, options.repeats)[0]
    after -= a_call(caches.only_the_others, caches.count, options.repeats)[0]
    line = f"| {step.batch} | {step.kv_heads} | {step.context} | {step.bytes / 1e6:.1f} | {ours * 1e6:.2f} |"
    line += f" {spread:.0%} | {after * 1e6:.2f} | {step.bytes / ours / limit:.1%} |"
    if options.torch:
        line += f" {best * 1e6:.2f} ({backend}) | {best / ours:.2f} | {best / after:.2f} |"
        line += f" {called * 1e6:.2f} | {called / ours:.2f} | {called / after:.2f} |"
    print(line, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8], metavar="B",
                        help="Sequences at once (default: %(default)s).")  # fmt: skip
    parser.add_argument("--contexts", nargs="*", type=int, default=[128, 256, 1024, 4096, 16384], metavar="L",
                        help="Slots of the cache that are read (default: %(default)s).")  # fmt: skip
    parser.add_argument("--kv-heads", nargs="*", type=int, default=[32, 8], metavar="HEADS",
                        help="Heads of keys and values (default: %(default)s).")  # fmt: skip
    parser.add_argument("--heads", type=int, default=32, help="Heads of queries (default: %(default)s).")
    parser.add_argument("--size", type=int, default=128, help="Values of a head (default: %(default)s).")
    parser.add_argument("--tokens", type=int, default=1, help="New tokens of a sequence (default: %(default)s).")
    parser.add_argument("--repeats", type=int, default=12, help="Timed replays of each graph (default: %(default)s).")
    parser.add_argument("--limit", type=float, metavar="TB/S",
                        help="The read limit of this GPU. It is measured if not given.")  # fmt: skip
    parser.add_argument("--kernel", choices=list(attention_check.IMPLEMENTATIONS), default="hip",
                        help="Whose kernel is timed (default: %(default)s).")  # fmt: skip
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True,
                        help="Time torch's attention beside it (default: yes).")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    limit = options.limit * 1e12 if options.limit else read_limit(DEVICE).bytes_per_second
    print(f"{torch.cuda.get_device_name()}, {DTYPE}, read limit {limit / 1e12:.3f} TB/s, {vars(options)}")
    columns = "rows | KV heads | context | MB | us | spread | us alone | share | torch, us | ratio | ratio alone"
    print(f"| {columns} | as called, us | ratio | ratio alone |")
    for batch in options.batches:
        for kv_heads in options.kv_heads:
            for context in options.contexts:
                show(Step(batch, context, options.heads, kv_heads, options.size, options.tokens), options, limit)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
