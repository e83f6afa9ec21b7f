"""Compiles the wheels' CPU kernels and holds what they compute to the float rule, those for 64-bit ARM under qemu.

    python scripts/wheel_gate.py --wheels DIR

DIR holds the unpacked `ziglang` wheel. Needs qemu-user and libc6-arm64-cross. `make gate` installs all that and runs
this. Every code path that the machine, or the emulated one, has is run. Says nothing about speed.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from build_wheel import ARCHS, ROOT, compiled, compiler
from torch import Tensor
from torch.nn import functional

from accelpatch.kernels.check import parity
from accelpatch.kernels.codebooks import table
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import linear
from accelpatch.kernels.cpu.native_library import ACTIVATIONS, DTYPES, ISAS, OFFSETS
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from tests.support import packs

QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
#: arch -> the program that runs it, on several processors
RUNS = {"x86_64": ((),), "aarch64": ((*QEMU, "-cpu", "cortex-a72"), (*QEMU, "-cpu", "max"))}
SIZES = ((1, 576, 576), (3, 33, 130), (17, 17, 192))
CALLER = ROOT / "scripts/gates/run_calls.cpp"
SHAPES = ROOT / "tests/kernels/cpu/harness.cpp"  # random shapes, and whole steps, beside memory that is watched
ROUNDS = 30
HEADERS = ROOT / "accelpatch/kernels/cpu"
NULL = -1


class Calls:
    """The list of calls for scripts/gates/run_calls.cpp, and what is to be said of what they give."""

    def __init__(self, folder: Path):
        self.folder, self.lines = folder, list[str]()
        self.results: list[tuple[str, int, Tensor, Any]] = []  # name, buffer, its form, judge
        self._count = 0

    def given(self, values: Tensor | None) -> int:
        """The number of a buffer with these values."""
        if values is None:
            return NULL
        index = self._count = self._count + 1
        file = self.folder / f"in{index}"
        file.write_bytes(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.lines.append(f"load {index} {file}")
        return index

    def result(self, name: str, like: Tensor, judge: Any) -> int:
        """The number of a buffer that a call fills. judge: takes it as a tensor; returns what is wrong, or None."""
        index = self._count = self._count + 1
        self.lines.append(f"new {index} {like.nbytes}")
        self.results.append((name, index, like, judge))
        return index

    def call(self, *words: Any) -> None:
        self.lines.append(" ".join(map(str, words)))

    def run(self, isa: int, *command: str) -> list[str] | None:
        """Runs all by a code path; returns what is wrong, or None where the machine has no such path."""
        saves = [f"save {index} {self.folder / f'out{index}'}" for _, index, _, _ in self.results]
        (self.folder / "list").write_text("\n".join([f"isa {isa}", *self.lines, *saves]))
        done = subprocess.run([*command, str(self.folder / "list")], capture_output=True, text=True, check=False)
        if done.stderr.startswith("isa returned"):
            return None
        if done.returncode:
            return [f"status {done.returncode}: {done.stderr}"]
        wrong = []
        for name, index, like, judge in self.results:
            raw = bytearray((self.folder / f"out{index}").read_bytes())
            found = torch.frombuffer(raw, dtype=like.dtype).view(like.shape)
            if reason := judge(found):
                wrong.append(f"{name}: {reason}")
        return wrong


def words_of(pack: Pack, calls: Calls, data: int, bias: int) -> Iterator[Any]:
    static = getattr(pack, "static_scale", None)
    yield from (pack.kind, int(pack.half_scales), OFFSETS[pack.offset], float(static or 0), pack.n, pack.k, pack.group)
    yield from (data, bias, calls.given(pack.order), calls.given(table(pack.codes) if pack.codes else None))


def by_rule(op: str, args: Any) -> Any:
    return lambda y: next((one.reason for one in parity.check(op, args, (y,)) if not one.ok), None)


def same(due: Tensor) -> Any:
    return lambda found: None if torch.equal(found, due) else "other bits than on x86"


def packing(calls: Calls, name: str, format_: str, q: Tensor, scale: Any, offset: Any, pack: Pack) -> None:
    """Packs hold the same bytes on every machine."""
    given = calls.given(q), calls.given(None if scale is None else scale.float())
    zero = None if offset is None else offset.float() if "minimum" in format_ else offset
    out = calls.result(f"{name} packed", pack.data, same(pack.data))
    calls.call("pack", *words_of(pack, calls, NULL, NULL), *given, calls.given(zero), out)


def products(calls: Calls) -> None:
    """Every format and dtype of activations, of few rows and of many."""
    for format_, size, dtype in itertools.product((*packs.FORMATS, *packs.FOREIGN), SIZES, DTYPES):
        m, n, k = packs.size_for(format_, *size)
        x, q, scale, offset, bias = packs.canonical(format_, m, n, k, dtype)
        pack, name = packs.packed(format_, q, scale, offset), f"{format_} {m}x{n}x{k} {dtype}"
        args = (x, *pack.arguments(), bias)
        data, held = calls.given(pack.data), calls.given(bias.float())
        y = calls.result(name, x.new_empty(m, n), by_rule("packed_linear", args))
        calls.call("linear", *words_of(pack, calls, data, held), calls.given(x), m, y, DTYPES[dtype])
        if dtype == torch.float32:
            packing(calls, name, format_, q, scale, offset, pack)
        if dtype == torch.float32 and m >= linear.PANELS["portable"]:
            y = calls.result(f"{name} by panels", x.new_empty(m, n), by_rule("packed_linear", args))
            calls.call("panels", *words_of(pack, calls, data, held), calls.given(x), m, y)


def integers(calls: Calls) -> None:
    """int8 activations: sums are exact, so that every machine has the same bits."""
    generator = torch.Generator().manual_seed(3)
    for (m, n, k), dtype, static in itertools.product(SIZES, DTYPES, (None, 0.02)):
        x = torch.randn(m, k, generator=generator).to(dtype)
        q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
        scale = (torch.rand(n, 1, generator=generator) + 0.5) / k**0.5 / 127
        pack = W8A8Pack.pack(q, scale, None if static is None else torch.tensor([static]))
        args = (x, *pack.arguments(), None)
        y = calls.result(f"w8a8 {m}x{n}x{k} {dtype} {static}", x.new_empty(m, n), by_rule("w8a8_packed", args))
        words = words_of(pack, calls, calls.given(pack.data), NULL)
        calls.call("linear", *words, calls.given(x), m, y, DTYPES[dtype])


def judged(exact: Tensor, plain: Tensor) -> Any:
    def judge(found: Tensor) -> str | None:
        compared = parity.compare(found, exact, parity.torch_error(plain, exact))
        return None if compared.ok else compared.reason

    return judge


def others(calls: Calls) -> None:
    """The norm, the gated activation and attention."""
    g = torch.Generator().manual_seed(4)
    for k in (31, 64, 576):
        x, weight = torch.randn(5, k, generator=g) * 3, torch.randn(k, generator=g)
        norm = [v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.to(v.dtype) for v in (x.double(), x)]
        y = calls.result(f"rmsnorm {k}", x, judged(*norm))
        calls.call("rmsnorm", calls.given(x), NULL, calls.given(weight), 1e-5, 5, k, y, NULL)
    functions = (functional.silu, functional.gelu, lambda v: functional.gelu(v, approximate="tanh"), functional.relu)
    for (name, number), act in zip(ACTIVATIONS.items(), functions, strict=True):
        gate, up = torch.randn(2, 1001, generator=g) * 5
        y = calls.result(name, gate, judged(act(gate.double()) * up.double(), act(gate) * up))
        calls.call("gated", calls.given(gate), calls.given(up), number, 1001, y)
    for heads, kv_heads, d in ((9, 3, 64), (6, 1, 22)):
        slots, starts = torch.tensor([0, 63, 200]), torch.tensor([0, 0, 130])
        q = torch.randn(3, heads, d, generator=g) * 2
        keys, values = torch.randn(2, 3, kv_heads, 201, d, generator=g)
        due = [attended(*(v.to(t) for v in (q, keys, values)), slots, starts) for t in (torch.float64, torch.float32)]
        y = calls.result(f"attention {heads} {kv_heads} {d}", q, judged(*due))
        given = [calls.given(one) for one in (q, keys, values)]
        sizes = (3, heads, kv_heads, d, kv_heads * 201 * d, 201 * d, 0, d**-0.5, 0.0)
        calls.call("attention", *given, y, calls.given(slots), calls.given(starts), *sizes)


def attended(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for b, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        k, v = (c[b, :, start : slot + 1].repeat_interleave(q.shape[1] // keys.shape[1], 0) for c in (keys, values))
        out[b] = functional.scaled_dot_product_attention(q[b, :, None], k, v)[:, 0]
    return out


def linked(wheels: Path, arch: str, source: Path, library: Path) -> Path:
    """A program for `arch` from one source, which loads `library`."""
    program = library.with_name(source.stem)
    command = [str(compiler(wheels, arch)), "-std=c++17", "-O1", f"-I{HEADERS}", str(source), str(library)]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def check(wheels: Path, arch: str) -> None:
    """Build and run one arch's library. Exits where a result is wrong."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        library = compiled(wheels, arch, folder / "built") / libraries.LIBRARY
        program, shapes = linked(wheels, arch, CALLER, library), linked(wheels, arch, SHAPES, library)
        calls = Calls(folder)
        for add in (products, integers, others):
            add(calls)
        for runner, (isa, name) in itertools.product(RUNS[arch], enumerate(ISAS)):
            wrong = calls.run(isa, *runner, str(program), str(library))
            if wrong is None:
                continue
            where = f"{arch}{' (' + runner[-1] + ')' if runner else ''}, {name}"
            print(f"{where}: {len(calls.results)} results, {len(wrong)} wrong", flush=True)
            if wrong:
                sys.exit("\n".join(wrong[:20]))
            subprocess.run([*runner, str(shapes), "1", str(ROUNDS), str(isa)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="Folder with the unpacked ziglang wheel.")
    given = parser.parse_args()
    for arch in ARCHS:
        check(given.wheels, arch)


if __name__ == "__main__":
    main()
