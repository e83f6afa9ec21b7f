"""`@accelpatch.module(FILE)`: a kernel in a file of one's own as a Python function, compiled at its first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.errors import ArgumentError, KernelError
from accelpatch.kernels.compiling import binary, compile_file, launch
from accelpatch.kernels.compiling.compile_file import CPU, ENDINGS
from accelpatch.kernels.compiling.host_function import HostFunction
from accelpatch.kernels.compiling.launch import LoadedKernel
from accelpatch.kernels.compiling.parameters import Parameter, annotated, declared, joined
from accelpatch.kernels.compiling.source_file import SourceFile, Stamp, unchanged

CHECK_EVERY = 0.5  # seconds after which a call looks whether the file has changed
Value = str | int | float | None


def module(
    file: str | Path,
    *,
    name: str = "",
    arch: str = "",
    defines: Mapping[str, Value] | None = None,
    include: Sequence[str | Path] = (),
    options: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], FileKernel]:
    """Decorator: the kernel of the decorated function's name in a file (.hip, .cu, .s, .co, .ptx, .cubin; .cpp for the
    CPU) as a function. The decorated function has its parameters, in order, and no body.

        @accelpatch.module("scale.hip")
        def scale(x: torch.float16, y: torch.float16, n: int, factor: float): ...

        scale([blocks], [256], x, y, x.numel(), 0.5)            # shared=bytes, stream=torch.cuda.Stream()

    A relative path is relative to the folder of the Python file. name: of the kernel, where it is another. arch: to
    compile for, where it is not the device's own, such as "sm_90a". defines: name -> value, None for none. include:
    folders of headers. options: of the compiler. Raises ArgumentError for an ending that is none of these, or an
    annotation that is no type of a parameter.
    """

    def decorate(function: Callable[..., Any]) -> FileKernel:
        home = Path(inspect.getfile(inspect.unwrap(function))).parent if _has_file(function) else Path()
        path = home.absolute() / Path(file).expanduser()
        if path.suffix not in ENDINGS:
            raise ArgumentError(f"{path} is no kernel file: its name ends in one of {', '.join(ENDINGS)}")
        folders = tuple(home.absolute() / Path(folder).expanduser() for folder in include)
        values = tuple((key, _value(value)) for key, value in (defines or {}).items())
        source = SourceFile(path, values, folders, tuple(options))
        kind = FileFunction if path.suffix == ".cpp" else FileKernel
        return kind(function, source, name or function.__name__, arch)

    return decorate


def _has_file(function: Callable[..., Any]) -> bool:
    """Whether a function was read from a file, and not from a prompt or a notebook."""
    return Path(inspect.unwrap(function).__code__.co_filename).is_file()


def _value(value: Value) -> str:
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


@dataclass
class _At:
    """What runs on a device, the files that it was made of, and when these were looked at."""

    runs: Any
    files: Stamp
    looked: float


class FileKernel:
    """A kernel of a file. `kernel([grid], [block], *arguments, shared=0, stream=None)` launches it on torch's current
    stream, or another, of the device on which its tensors lie.

    Arguments are tensors (contiguous, on one device, of the annotated dtype), data_ptr() of any, None for NULL, ints
    and floats. A call after the file or a header that it includes has changed compiles it again. Raises ArgumentError
    for arguments that do not fit, KernelError for a file that does not compile, load or have the kernel.
    """

    def __init__(self, function: Callable[..., Any], source: SourceFile, name: str, arch: str):
        self.file, self.name, self.arch = source, name, arch
        self.names, self.annotated = _signature(function)
        self._on: dict[int, _At] = {}
        functools.update_wrapper(self, function)

    def __call__(self, grid: Any, block: Any, *values: Any, shared: int = 0, stream: Any = None) -> None:
        for value in values:
            if isinstance(value, Tensor):
                index = value.get_device()
                break
        else:
            index = index_of(launch.current())
        at = self._on.get(index)
        if at is None or monotonic() - at.looked > CHECK_EVERY:
            at = self._looked_at(index)
        at.runs.launch(grid, block, values, shared, stream)

    def compile(self, arch: str = "", to: str | Path | None = None) -> Path:
        """The path of what a device loads, compiled if it is not in the cache. arch: "gfx942", "sm_90", ...; default:
        of the GPU that is here. to: a file or folder that gets a copy. Raises KernelError."""
        wanted = arch or self.arch or self._here().arch
        if to is not None:
            return compile_file.copy(self.file, wanted, Path(to))
        return compile_file.loadable(self.file, wanted)

    def source(self, arch: str = "") -> str:
        """The kernel file as AMD's assembly or NVIDIA's PTX. Saved as .s or .ptx and edited it is a kernel file for
        this decorator too. arch: as in `compile`. Raises KernelError."""
        return compile_file.text_of(self.file, arch or self.arch or self._here().arch)

    def kernels(self, arch: str = "") -> tuple[str, ...]:
        """The names of all kernels in the file, as compiled for an arch. Raises KernelError."""
        wanted = arch or self.arch or self._here().arch
        return tuple(binary.read(compile_file.loadable(self.file, wanted), wanted).kernels)

    def _here(self) -> Device:
        return launch.current()

    def _looked_at(self, index: int) -> _At:
        """What runs on a device, compiled again where its files have changed."""
        at = self._on.get(index)
        if at is None or not unchanged(at.files):
            files = self.file.stamp()  # before they are read: a change meanwhile is seen by the next call
            at = _At(self._load(device_at(index, self.file.path)), files, 0.0)
            self._on[index] = at
        at.looked = monotonic()
        return at

    def _load(self, device: Device) -> Any:
        path = compile_file.loadable(self.file, self.arch or device.arch)
        found = binary.read(path, device.arch)
        name = found.name_of(self.name, self.file.path)
        return LoadedKernel(path, device, name, self.name, self.names, self.parameters(found.kernels[name]))

    def parameters(self, compiled: Sequence[Parameter] | None) -> list[Parameter]:
        """The kernel's parameters, of all that is known of them. Raises ArgumentError where the decorated function has
        other ones than the file."""
        source = declared(self.file.text(), self.name) if compile_file.is_c(self.file.path) else None
        given = compiled if compiled is not None else source
        if given is not None and len(given) != len(self.names):
            raise ArgumentError(
                f"{self.name} has {len(given)} parameters in {self.file.path}, and here {len(self.names)} "
                f"({', '.join(self.names)}): write them as the file has them"
            )
        unknown = [Parameter()] * len(self.names)
        if source is not None and len(source) != len(self.names):
            source = None  # another function of this name, such as a forward declaration's macro
        each = zip(compiled or unknown, source or unknown, self.annotated, self.names, strict=True)
        return [joined(one, two, user, f"{self.name}: {name}") for one, two, user, name in each]


class FileFunction(FileKernel):
    """A function of a C++ file for the CPU. `function(*arguments)` calls it, and returns when it has. Arguments are as
    those of a FileKernel, tensors on the CPU; what the function returns is not read."""

    def __call__(self, *values: Any) -> None:  # type: ignore[override]
        at = self._on.get(-1)
        if at is None or monotonic() - at.looked > CHECK_EVERY:
            at = self._looked_at(-1)
        at.runs.call(values)

    def _here(self) -> Device:
        return probe(CPU)

    def _load(self, device: Device) -> HostFunction:
        path = compile_file.loadable(self.file, device.arch)
        return HostFunction(path, self.name, self.names, self.parameters(None))


def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], list[Parameter]]:
    """Names of a decorated function's parameters, and what their annotations say. Raises ArgumentError."""
    given = inspect.signature(function).parameters.values()
    if wrong := [str(one) for one in given if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]:
        raise ArgumentError(f"{function.__name__} has {wrong[0]}: a kernel's parameters each have a name and a place")
    made = [
        Parameter() if one.annotation is one.empty else annotated(one.annotation, f"{function.__name__}: {one.name}")
        for one in given
    ]
    return tuple(one.name for one in given), made


def index_of(device: Device) -> int:
    """Torch's index of a device that is here."""
    assert device.index is not None
    return device.index


def device_at(index: int, file: Path) -> Device:
    """The device on which tensors lie. Raises KernelError for a kernel file of GPUs and tensors of a CPU."""
    if file.suffix == ".cpp":
        if index >= 0:
            raise KernelError(f"{file} runs on the CPU, and its tensors lie on cuda:{index}: move them")
        return probe(CPU)
    if index < 0:
        raise KernelError(f"{file} runs on a GPU, and its tensors lie on the CPU: move them, or write it as .cpp")
    return probe(f"cuda:{index}")
