"""Resources and instruction counts of compiled kernels: AMD assembly and code objects, cubins, Triton's cache.

What a file cannot say is left out with the reason: a code object's instructions need llvm-objdump, a cubin's resources
cuobjdump, which Triton's wheel brings. Nothing of a file is run, and tools get its path as one argument.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelpatch.device import facts_of
from accelpatch.errors import AccelpatchError, KernelError
from accelpatch.kernels.compiling import binary, msgpack
from accelpatch.kernels.compiling.occupancy import Resources
from accelpatch.profiling import isa
from accelpatch.profiling.isa import Counts
from accelpatch.profiling.limits import Occupancy, occupancy

SUFFIXES = (".s", ".amdgcn", ".co", ".hsaco", ".cubin")
MOST_BYTES = 256 << 20
SECONDS = 120
OBJDUMPS = (
    "/opt/rocm/llvm/bin/llvm-objdump", *(f"llvm-objdump-{release}" for release in (22, 21, 20, 19)), "llvm-objdump",
)  # fmt: skip
ASSUMED, NO_SIZE = 256, "the size of a block is not in the file: 256 threads are assumed"
_FIELDS = {
    "registers": ".vgpr_count", "vector_spills": ".vgpr_spill_count", "scalar_spills": ".sgpr_spill_count",
    "scratch": ".private_segment_fixed_size", "shared": ".group_segment_fixed_size",
    "threads": ".max_flat_workgroup_size",
}  # fmt: skip
_DAMAGED = (ValueError, struct.error, IndexError, KeyError, StopIteration, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a file. used: its resources, shared memory of the launch included where it is known. scalars,
    accumulators: AMD's scalar registers, and those of the vector registers that are for matrix instructions alone.
    counts: of its instructions. occupancy: None where its arch's is not known. trips: through shared memory, by
    Triton's IR. notes: what is not known, and why."""

    file: str
    arch: str
    used: Resources
    scalars: int | None = None
    accumulators: int | None = None
    counts: Counts | None = None
    occupancy: Occupancy | None = None
    trips: int | None = None
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "file": self.file, "arch": self.arch, **vars(self.used), "scalar_registers": self.scalars,
            "accumulators": self.accumulators, "trips_through_shared": self.trips,
            "counts": None if self.counts is None else self.counts.to_dict(),
            "occupancy": None if self.occupancy is None else self.occupancy.to_dict(), "notes": list(self.notes),
        }  # fmt: skip


def read(path: Path) -> tuple[list[Kernel], list[str]]:
    """The kernels of a file, or of every file in a folder, and what was left out of a folder, with the reason.

    Raises AccelpatchError for a file that is none of SUFFIXES, cut off or damaged, and for a folder without any.
    """
    if not path.is_dir():
        return of_file(path), []
    files = [one for one in sorted(path.rglob("*")) if one.suffix in SUFFIXES and one.is_file() and _is_first(one)]
    if not files:
        raise AccelpatchError(f"{path} holds no compiled kernels: none of its files ends in {', '.join(SUFFIXES)}")
    found, left = list[Kernel](), list[str]()
    for file in files:
        try:
            found += of_file(file)
        except (AccelpatchError, OSError) as error:
            left.append(str(error))
    return found, left


def _is_first(file: Path) -> bool:
    """Whether no other form of the same kernel says more: Triton writes assembly next to code objects."""
    return file.suffix != ".hsaco" or not file.with_suffix(".amdgcn").is_file()


def of_file(path: Path) -> list[Kernel]:
    """The kernels of one file. Raises AccelpatchError as `read`."""
    try:
        if path.suffix not in SUFFIXES:
            raise AccelpatchError(
                f"{path} is no compiled kernel: give a {', '.join(SUFFIXES)} file, or a folder of them"
            )
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise AccelpatchError(f"{path} has {size >> 20} MiB, more than the {MOST_BYTES >> 20} that are read")
        data = path.read_bytes()
    except OSError as error:
        raise AccelpatchError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if path.suffix in (".s", ".amdgcn"):
            made = _of_assembly(path, data.decode())
        elif path.suffix == ".cubin":
            made = _of_cubin(path, data)
        else:
            made = [kernel for code in _bundled(data) for kernel in _of_code_object(path, code)]
    except _DAMAGED as error:
        raise AccelpatchError(
            f"{path} is no {path.suffix} file, or it is cut off ({str(error)[:80] or type(error).__name__}): compile "
            "it again"
        ) from error
    return [_finished(one, path) for one in made]


def _finished(kernel: Kernel, path: Path) -> Kernel:
    """A kernel with what Triton's files next to it say, and its occupancy."""
    kernel = _with_triton(kernel, path)
    try:
        return replace(kernel, occupancy=occupancy(kernel.arch, kernel.used))
    except KernelError as error:
        return replace(kernel, notes=(*kernel.notes, str(error)))


def _with_triton(kernel: Kernel, path: Path) -> Kernel:
    """A kernel with the dynamic shared memory and the warps of its launch, which Triton's metadata have."""
    file, ir = path.with_suffix(".json"), path.with_suffix(".ttgir")
    if file.is_file():
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
            known = facts_of(kernel.arch)
            wave = known.wave_size if known else int(facts["target"]["warp_size"])
            used = replace(
                kernel.used,
                shared=max(kernel.used.shared, int(facts["shared"])),
                threads=wave * int(facts["num_warps"]),
            )
            kernel = replace(kernel, used=used, notes=tuple(one for one in kernel.notes if one != NO_SIZE))
        except _DAMAGED as error:
            said = f"{file.name} is not Triton's, or it is cut off ({str(error)[:60]}): shared memory is the static one"
            kernel = replace(kernel, notes=(*kernel.notes, said))
    if ir.is_file():
        text = ir.read_text(encoding="utf-8", errors="replace")
        kernel = replace(kernel, trips=isa.trips_through_shared(text))
    return kernel


def _of_assembly(path: Path, text: str) -> list[Kernel]:
    """Of AMD assembly, whose metadata are YAML in the form in which LLVM writes it."""
    at = text.index("amdhsa.kernels:")
    target = re.search(r"^\s*amdhsa\.target:\s*['\"]?([\w.:+-]+)", text[at:], re.MULTILINE)
    if target is None:
        raise ValueError("its metadata name no amdhsa.target")
    entries, counts = re.split(r"^  - ", text[at:], flags=re.MULTILINE)[1:], isa.of_amd(text)
    made = []
    for entry in entries:
        if not re.search(r"^    \.name:|^\.name:", entry, re.MULTILINE):
            continue
        values = dict(re.findall(r"^(?:    )?(\.\w+):[ \t]+['\"]?([^'\"\n]+)", entry, re.MULTILINE))
        made.append(_of_metadata(path, _arch(target[1]), values, counts))
    if not made:
        raise ValueError("its metadata list no kernels")
    return made


def _of_metadata(path: Path, arch: str, values: Mapping[str, Any], counts: Mapping[str, Counts]) -> Kernel:
    numbers = {name: int(values.get(key, 0)) for name, key in _FIELDS.items()}
    name = str(values[".name"]).strip()
    return Kernel(
        path.name, arch, Resources(name, **numbers), _number(values.get(".sgpr_count")),
        _number(values.get(".agpr_count")), counts.get(name),
    )  # fmt: skip


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _arch(target: str) -> str:
    """gfx942 of amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-."""
    return (
        target.rpartition("-")[2].partition(":")[0] if not target.endswith("-") else target.split(":")[0].split("-")[-1]
    )


def _bundled(data: bytes) -> Iterator[bytes]:
    """Each code object of a bundle, or the file itself."""
    if not data.startswith(binary.BUNDLE):
        yield data
        return
    (count,), at = struct.unpack_from("<Q", data, len(binary.BUNDLE)), len(binary.BUNDLE) + 8
    if count > 1024:
        raise ValueError(f"it says that it bundles {count} files")
    for _ in range(count):
        offset, size, length = struct.unpack_from("<QQQ", data, at)
        at += 24 + length
        if offset + size > len(data):
            raise ValueError("a code object of the bundle goes beyond its end")
        if data[offset : offset + size].startswith(binary.ELF):
            yield data[offset : offset + size]


def _of_code_object(path: Path, data: bytes) -> list[Kernel]:
    _check_whole(data)
    note = next(words for kind, words in binary._notes(data) if kind == binary.AMD_NOTE)
    facts: Any = msgpack.unpack(note)
    arch = _arch(facts["amdhsa.target"].split(":")[0])
    said, why = _disassembled(path)
    counts = isa.of_amd(said)
    made = [_of_metadata(path, arch, one, counts) for one in facts["amdhsa.kernels"]]
    return [replace(one, notes=(*one.notes, why)) if why else one for one in made]


def _check_whole(data: bytes) -> None:
    """Raise ValueError for no ELF file, or one cut off: the table of its sections is at its end."""
    if not data.startswith(binary.ELF):
        raise ValueError("it is no ELF file")
    (start,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    if start + 64 * count > len(data):
        raise ValueError("its sections go beyond its end")


def _disassembled(path: Path) -> tuple[str, str]:
    """(what llvm-objdump prints, "") of a code object, or ("", why not)."""
    if path.read_bytes()[:4] != binary.ELF:
        return "", "its instructions are not counted, as it is in a bundle: unpack it by clang-offload-bundler"
    why = "there is no llvm-objdump here; install LLVM or ROCm"
    for tool in filter(None, map(shutil.which, OBJDUMPS)):
        said, why = _run([tool, "--disassemble", "--no-show-raw-insn", str(path.resolve())], tool)
        if not why:
            return said, ""
    return "", f"its instructions are not counted: {why}"


def _run(command: list[str], tool: str) -> tuple[str, str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        return "", f"{Path(tool).name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}"
    return done.stdout, ""


def cuobjdump() -> str | None:
    """Path of cuobjdump: on PATH, or in Triton's wheel; None where there is none."""
    spec = find_spec("triton")
    roots = [] if spec is None else spec.submodule_search_locations or []
    places = [shutil.which("cuobjdump"), *(str(Path(root) / "backends/nvidia/bin/cuobjdump") for root in roots)]
    return next((one for one in places if one and Path(one).is_file()), None)


def counts_of_cubin(path: Path) -> tuple[dict[str, Counts], str]:
    """(kernel -> Counts, "") of a cubin, or ({}, why not)."""
    tool = cuobjdump()
    if tool is None:
        return {}, "instructions are not counted: there is no cuobjdump here; pip install triton, whose wheel brings it"
    sass, why = _run([tool, "-sass", str(path.resolve())], tool)
    return isa.of_sass(sass), why


def _of_cubin(path: Path, data: bytes) -> list[Kernel]:
    _check_whole(data)
    arch, tool = binary._of_cubin(data).arch, cuobjdump()
    if tool is None:
        raise AccelpatchError(
            f"{path} cannot be read without cuobjdump: pip install triton, whose wheel brings it, or install the CUDA "
            "toolkit"
        )
    said, why = _run([tool, "--dump-resource-usage", str(path.resolve())], tool)
    kernels = dict(re.findall(r"^ Function (\S+?):\n\s+(.+)$", said, re.MULTILINE))
    if why or not kernels:
        raise ValueError(why or "cuobjdump finds no kernels in it")
    counts, without = counts_of_cubin(path)
    notes = (NO_SIZE, *([without] if without else []))
    return [
        Kernel(path.name, arch, _of_usage(name, usage), counts=counts.get(name), notes=notes)
        for name, usage in kernels.items()
    ]


def _of_usage(name: str, usage: str) -> Resources:
    values = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    stack = values.get("STACK", 0) + values.get("LOCAL", 0)
    return Resources(name, values["REG"], 0, 0, stack, values.get("SHARED", 0), ASSUMED)
