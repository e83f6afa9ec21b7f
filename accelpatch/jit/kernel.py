"""``jit()`` makes a kernel from a Python function: compiled for an arch, and launched or emulated."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelpatch.errors import ArgumentError, KernelError
from accelpatch.jit.signature import address, number, packed, signature

if TYPE_CHECKING:
    from accelpatch.jit.compiling import Compiled
    from accelpatch.jit.ir import Program

EMULATED = "gfx942"  # the emulator's default arch
_MOST_THREADS = 1024
#: passes (accelpatch/jit/passes/) without which a kernel is correct, but slower
OPTIONAL = ("dead_blocks", "common_subexpressions", "dead_stores", "dead_code", "hide_argument_loads", "hide_stalls",
            "split_arrays", "auto_waits", "linear_scan")  # fmt: skip
REQUIRED = ("accumulator_moves", "required_noops")
PASSES = (*OPTIONAL, *REQUIRED)


@dataclass(frozen=True)
class CodeObject:
    """A compiled kernel. code: the ELF file that a GPU loads. vgprs, agprs, sgprs: registers in use. lds: bytes per
    workgroup."""

    name: str
    arch: str
    code: bytes
    assembly: str
    vgprs: int
    agprs: int
    sgprs: int
    lds: int


class Kernel:
    """A kernel written as a function ``f(J, ...)``, which is traced for each set of values of its compile-time
    parameters.

    Parameters that are annotated with a string, a HIP type such as ``"int*"``, are passed at run time.
    """

    def __init__(
        self, function: Callable[..., Any], threads: int, device: str | None, waits: str = "checked",
        without: Collection[str] = (),
    ):  # fmt: skip
        self.function, self.threads, self.device = function, threads, device
        self.waits, self.left_out = waits, tuple(without)
        self.signature = signature(function)
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self._compiled: dict[Hashable, Compiled] = {}
        self._code: dict[str, bytes] = {}  # assembly -> code object

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], *arguments: Any, device: str | None = None,
        arch: str | None = None, stream: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Launch: ``kernel([groups], [threads], ...)`` with all arguments in the order of the function's parameters.

        grid: workgroups, block: threads of a workgroup; one to three sizes each. A pointer is passed as a tensor or its
        data_ptr(). device: "emulate" runs the kernel in the emulator, on CPU tensors; by default it runs on torch's
        current AMD GPU. arch: that of the emulator, by default gfx942. options: of accelpatch.jit.emulate.run, such as
        steps. Raises ArgumentError for arguments that do not fit, CompileError, KernelError.
        """
        values = self.signature.bound(self.signature.names, arguments, {})
        groups, items = _sizes("grid", grid), _sizes("block", block)
        if items[0] * items[1] * items[2] > self.threads:
            raise ArgumentError(
                f"{self.__name__} is compiled for at most {self.threads} threads, not {list(block)}: say "
                f"jit(threads={items[0] * items[1] * items[2]})"
            )
        constants = {name: values[name] for name in self.signature.constants}
        chosen = device or self.device
        if chosen == "emulate":
            self._emulate(arch or EMULATED, groups, items, values, constants, options)
        elif chosen is None and not options:
            self._launch(groups, items, values, constants, stream)
        else:
            raise KernelError(f"device is 'emulate', or None for torch's present GPU; not {chosen!r}, {options}")

    def compile(self, arch: str, *constants: Any, **named: Any) -> CodeObject:
        """The code object for an arch and values of the compile-time parameters, from the cache if possible.

        Raises CompileError, with the Python line, for a kernel that is wrong, or where there is no assembler.
        """
        made = self._built(arch, self.signature.bound(self.signature.constants, constants, named))
        used = made.allocation.used
        code = self._assembled(made, self.signature.bound(self.signature.constants, constants, named))
        return CodeObject(made.name, arch, code, made.assembly, used["v"], used["a"], used["s"], made.lds)

    def source(self, arch: str, *constants: Any, **named: Any) -> str:
        """The assembly for an arch; this needs no assembler."""
        return self._built(arch, self.signature.bound(self.signature.constants, constants, named)).assembly

    def ir(self, arch: str = EMULATED, *constants: Any, **named: Any) -> Program:
        """The intermediate representation after the passes, with virtual registers; ``str`` of it shows the blocks."""
        return self._built(arch, self.signature.bound(self.signature.constants, constants, named)).program

    def notes(self, arch: str = EMULATED, *constants: Any, **named: Any) -> list[str]:
        """What passes left unchanged, and why, each with its Python line."""
        return self.ir(arch, *constants, **named).notes

    def without(self, *names: str) -> Kernel:
        """The kernel compiled without some passes, to see what they do; docs/jit-passes.md names them."""
        fewer = (*self.left_out, *names)
        return jit(threads=self.threads, device=self.device, waits=self.waits, without=fewer)(self.function)

    def _built(self, arch: str, constants: dict[str, Any]) -> Compiled:
        # The key keeps the values alive, so that no new object can have the address, and so the hash, of a freed one.
        # It has their repr too, since 1, 1.0 and True are equal.
        key = arch, repr(constants), tuple(constants.values())
        try:
            if key in self._compiled:
                return self._compiled[key]
        except TypeError:  # not hashable, such as a list, which may change
            return self._compile(arch, constants)
        self._compiled[key] = self._compile(arch, constants)
        return self._compiled[key]

    def _compile(self, arch: str, constants: dict[str, Any]) -> Compiled:
        from accelpatch.jit.compiling import compiled

        return compiled(
            self.function, arch, self.threads, self.signature.arguments, constants, waits=self.waits,
            without=self.left_out,
        )  # fmt: skip

    def _assembled(self, made: Compiled, constants: dict[str, Any]) -> bytes:
        from accelpatch.jit.assembler import code_object

        if made.assembly not in self._code:
            values = re.sub(r" at 0x[0-9a-f]+", "", repr(constants))  # addresses differ from process to process
            source = {"kernel": self.__name__, "source": _source(self.function), "constants": values}
            self._code[made.assembly] = code_object(made.assembly, made.program.arch, source)
        return self._code[made.assembly]

    def _launch(
        self, grid: Sequence[int], block: Sequence[int], values: dict[str, Any], constants: dict[str, Any],
        stream: int | None,
    ) -> None:  # fmt: skip
        from accelpatch.jit.launch import arch_of_device, launch

        if wrong := [name for name in self.left_out if name in REQUIRED]:
            raise KernelError(f"{self.__name__} without {', '.join(wrong)} is wrong on a GPU: it can only be looked at")
        made = self._built(arch_of_device(), constants)
        segment = packed(self.signature.arguments, values)
        launch(self._assembled(made, constants), self.__name__, grid, block, segment, stream=stream)

    def _emulate(
        self, arch: str, grid: Sequence[int], block: Sequence[int], values: dict[str, Any],
        constants: dict[str, Any], options: dict[str, Any],
    ) -> None:  # fmt: skip
        from accelpatch.jit.emulate import run

        passed = []
        for one in self.signature.arguments:
            (address if one.pointer else number)(one, values[one.name])
            passed.append((one.kind if one.pointer else str(one.type), values[one.name]))
        run(self._built(arch, constants).assembly, self.__name__, grid, block, passed, arch=arch, **options)


def _sizes(name: str, given: Sequence[int]) -> tuple[int, int, int]:
    sizes = [*given, 1, 1][:3] if isinstance(given, list | tuple) and 1 <= len(given) <= 3 else []
    if not sizes or any(not isinstance(one, int) or one < 1 for one in sizes):
        raise ArgumentError(f"{name} is a list of one to three sizes above zero, not {given!r}")
    return sizes[0], sizes[1], sizes[2]


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except OSError:
        return ""  # there is no source file, as for a function typed at a prompt; the key has the assembly too


def jit(
    *, threads: int = 256, device: str | None = None, waits: str = "checked", without: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: makes a kernel from ``f(J, ...)``.

    threads: the largest workgroup, which limits the registers per thread. device: "emulate" makes calls run in the
    emulator. waits: "checked", the kernel contains every s_waitcnt, and a register that is used too early is an error;
    "auto", the jit inserts them, as late as possible. without: names of passes to leave out. Raises ArgumentError for
    other values.
    """
    if not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
        raise ArgumentError(f"jit(threads={threads!r}): a workgroup has 1 to {_MOST_THREADS} threads; write @jit()")
    if waits not in ("checked", "auto"):
        raise ArgumentError(f"jit(waits={waits!r}): say 'checked', the kernel has them, or 'auto', the jit finds them")
    if isinstance(without, str) or set(without) - set(PASSES):
        raise ArgumentError(f"jit(without={without!r}): give a list of passes, of {', '.join(PASSES)}")
    return lambda function: Kernel(function, threads, device, waits, without)
