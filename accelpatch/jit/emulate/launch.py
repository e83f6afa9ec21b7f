"""A launch: the descriptor of the kernel, the registers that the hardware sets at the start, the workgroups in turn."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelpatch.jit.emulate import workgroup
from accelpatch.jit.emulate.arguments import Buffer, KernelMetadata, allow, metadata_of, pack
from accelpatch.jit.emulate.assembly import Program
from accelpatch.jit.emulate.fault import EmulationError
from accelpatch.jit.emulate.lds import Lds
from accelpatch.jit.emulate.memory import Memory
from accelpatch.jit.emulate.operands import EXEC, VGPR
from accelpatch.jit.emulate.private import Private
from accelpatch.jit.emulate.registry import Code, code_of
from accelpatch.jit.emulate.wait_states import WaitStates
from accelpatch.jit.emulate.wave import ALL, LANES, Wave
from accelpatch.jit.emulate.workgroup import Workgroup

ARCHS = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}  # bytes of LDS of a workgroup
MOST_THREADS = 1024
#: registers that the hardware sets, in this order: field of the descriptor, how many
USER_REGISTERS = (("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
                  ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1))  # fmt: skip

Sizes = Sequence[int]


@dataclass(frozen=True)
class Options:
    """As `run` takes them."""

    shared: int
    steps: int
    strict: bool
    misaligned: bool
    wait_states: bool
    seed: int

    @property
    def poison(self) -> int:
        """What registers hold before they are written: differs with the seed, so that its use shows."""
        return 0x7FC0DEAD ^ self.seed * 0x9E3779B9 & 0x00FFFFFF


@dataclass(frozen=True, eq=False)
class Launch:
    """grid: workgroups. block: threads of one. lds: bytes, the dynamic ones with them."""

    code: Code
    entry: int
    descriptor: dict[str, str]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: Buffer
    packet: Buffer
    memory: Memory
    lds: int
    options: Options

    def run(self) -> None:
        order = random.Random(self.options.seed)
        for z, y, x in itertools.product(*(range(size) for size in reversed(self.grid))):
            waves = self._waves((x, y, z))
            workgroup.run(self.code, waves, self.options.steps, order)

    def _waves(self, number: tuple[int, int, int]) -> list[Wave]:
        threads = self.block[0] * self.block[1] * self.block[2]
        count = -(-threads // LANES)
        group = Workgroup(
            number, self.memory, Lds(self.lds, count, self.options.strict, self.options.poison), self.options.misaligned
        )
        waves = []
        for wave_number in range(count):
            wave = Wave(wave_number, group, self.options.strict, self.options.poison)
            wave.pc = self.entry
            wave.wait_states = WaitStates(self.code.arch) if self.options.wait_states else None
            wave.private = Private(self._set("private_segment_fixed_size"), self.options.strict, self.options.poison)
            self._scalars(wave, number)
            thread = wave_number * LANES + np.arange(LANES)
            x, rest = thread % self.block[0], thread // self.block[0]
            wave.u32[0] = x | rest % self.block[1] << 10 | rest // self.block[1] << 20
            wave.set_exec(ALL if thread[-1] < threads else (1 << threads - wave_number * LANES) - 1)
            wave.defined[VGPR] = wave.defined[EXEC] = wave.defined[EXEC + 1] = ALL
            waves.append(wave)
        return waves

    def _scalars(self, wave: Wave, number: tuple[int, int, int]) -> None:
        addresses = {"kernarg_segment_ptr": self.arguments.address, "dispatch_ptr": self.packet.address}
        at = 0
        for name, words in USER_REGISTERS:
            if self._set(f"user_sgpr_{name}"):
                value = addresses.get(name, 0)
                for word in range(words):
                    wave.define(at + word, value >> 32 * word & 0xFFFFFFFF)
                at += words
        first, length = self._set("user_sgpr_kernarg_preload_offset"), self._set("user_sgpr_kernarg_preload_length")
        for word in range(length):
            [value] = struct.unpack_from("<I", self.arguments.storage, 4 * (first + word))
            wave.define(at + word, value)
        at = self._set("user_sgpr_count", at + length)
        for axis, size in zip("xyz", number, strict=True):
            if self._set(f"system_sgpr_workgroup_id_{axis}", int(axis == "x")):
                wave.define(at, size)
                at += 1

    def _set(self, name: str, otherwise: int = 0) -> int:
        return number_of(self.descriptor, name, otherwise)


def number_of(descriptor: dict[str, str], name: str, otherwise: int = 0) -> int:
    return int(descriptor.get(name, str(otherwise)), 0)


def prepare(
    text: str, name: str, grid: Sizes, block: Sizes, arguments: Sequence[tuple[str, Any]], arch: str,
    memory: Sequence[Any], options: Options,
) -> Launch:  # fmt: skip
    """Everything that can be wrong before a wave runs is found here. Raises EmulationError."""
    if arch not in ARCHS:
        raise EmulationError(f"the emulator knows {', '.join(ARCHS)}, not {arch}")
    code = code_of(text, arch)
    descriptor, metadata = kernel_of(code.program, name, arch)
    grid3, block3 = sizes("grid", grid), sizes("block", block)
    check_block(block3, metadata)
    lds = number_of(descriptor, "group_segment_fixed_size") + options.shared
    if lds > ARCHS[arch]:
        raise EmulationError(f"{lds} bytes of LDS are more than the {ARCHS[arch]} that a workgroup has on {arch}")
    allowed = Memory()
    for constant, data in code.constants.items():
        allowed.add(f"the constant {constant}", code.program.addresses[constant], len(data), data, writable=False)
    for number, one in enumerate(memory):
        allow(f"memory[{number}]", one, allowed)
    packed = pack(metadata, arguments, hidden_values(grid3, block3, options.shared), allowed)
    return Launch(
        code=code,
        entry=code.program.labels[name],
        descriptor=descriptor,
        grid=grid3,
        block=block3,
        arguments=Buffer("the kernel's arguments", bytes(packed), allowed),
        packet=Buffer("the dispatch packet", dispatch_packet(grid3, block3), allowed),
        memory=allowed,
        lds=lds,
        options=options,
    )


def kernel_of(program: Program, name: str, arch: str) -> tuple[dict[str, str], KernelMetadata]:
    """The descriptor and the metadata of a kernel that can run here."""
    if program.target and arch not in program.target:
        raise EmulationError(f"the assembly is for {program.target}, and it was to be run as {arch}")
    descriptor = program.kernels.get(name)
    if descriptor is None or name not in program.labels:
        raise EmulationError(f"the assembly has no kernel {name}; it has {', '.join(program.kernels) or 'none'}")
    check_float_mode(descriptor)
    return descriptor, metadata_of(program.metadata, name) or KernelMetadata((), 0, 0)


def sizes(name: str, given: Sizes) -> tuple[int, int, int]:
    found = [int(one) for one in given]
    if not 1 <= len(found) <= 3 or min(found) < 1:
        raise EmulationError(f"{name} must be one to three positive sizes, not {list(given)}")
    x, y, z = found + [1] * (3 - len(found))
    return x, y, z


def check_block(block: tuple[int, int, int], metadata: KernelMetadata) -> None:
    most = metadata.most_threads or MOST_THREADS
    threads = block[0] * block[1] * block[2]
    if threads > most:
        raise EmulationError(f"a block of {threads} threads is more than the kernel's {most}")


def check_float_mode(descriptor: dict[str, str]) -> None:
    """The emulator's floats are numpy's: rounded to nearest even, with subnormals."""
    for name, value in (
        ("float_round_mode_32", 0),
        ("float_round_mode_16_64", 0),
        ("float_denorm_mode_32", 3),
        ("float_denorm_mode_16_64", 3),
    ):
        if number_of(descriptor, name, value) != value:
            raise EmulationError(
                f".amdhsa_{name} must be {value}: the emulator rounds to nearest even, with subnormals"
            )


def hidden_values(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> dict[str, int]:
    found = {"grid_dims": 3 - (grid[2] == 1) * (1 + (grid[1] == 1)), "dynamic_lds_size": shared}
    for axis, count, size in zip("xyz", grid, block, strict=True):
        found |= {f"block_count_{axis}": count, f"group_size_{axis}": size}
    return found


def dispatch_packet(grid: tuple[int, int, int], block: tuple[int, int, int]) -> bytes:
    """The AQL packet: sizes of a workgroup, and of the grid in threads."""
    threads = [count * size for count, size in zip(grid, block, strict=True)]
    return struct.pack("<HH3HH3I", 0, 3, *block, 0, *threads).ljust(64, b"\0")
