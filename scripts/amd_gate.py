"""Compiles every HIP kernel for gfx90a, gfx942 and gfx950 without a GPU; reads the assembly against a checked-in table.

    python scripts/amd_gate.py --wheels DIR [--write]

DIR holds the unpacked `triton` and `ziglang` wheels (``triton/``, ``ziglang/`` or ``zig/ziglang/`` somewhere below it).
Needs clang-19, lld-19, llvm-19, libamdhip64-dev, rocm-device-libs. Says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "accelpatch/kernels/hip"
TABLE = ROOT / "scripts/amd_gate.json"
KERNELS = ("gemv", "gemv_int8", "gemv_int4", "gemv_fp8")
ARCHS = {"gfx90a": None, "gfx942": 9402, "gfx950": 9500}  # the ISA version where the distribution's libraries lack it
BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
# The instruction that each arch and activation type must use: gfx90a's f16 matrix instructions flush subnormals.
MEANT = {
    ("gfx90a", "Bf16"): r"v_mfma_f32_16x16x16bf16_1k",
    ("gfx90a", "F16"): r"v_fma_mix_f32",
    ("gfx942", "Bf16"): r"v_mfma_f32_16x16x16_bf16",
    ("gfx942", "F16"): r"v_mfma_f32_16x16x16_f16",
    ("gfx950", "Bf16"): r"v_mfma_f32_16x16x16_bf16",
    ("gfx950", "F16"): r"v_mfma_f32_16x16x16_f16",
}
# Quantised weights multiply in fp16; bf16 activations staged for it have no subnormals worth keeping.
STAGED_BF16 = {
    "gfx90a": r"v_mfma_f32_16x16x16f16",
    "gfx942": r"v_mfma_f32_16x16x16_f16",
    "gfx950": r"v_mfma_f32_16x16x16_f16",
}


@dataclass(frozen=True)
class Figures:
    """What one kernel takes on one arch. ``waves``: resident a SIMD, from 512 registers dealt in eights, at most 8."""

    vgprs: int
    sgpr_spills: int
    waves: int


def device_libraries(into: Path, arch: str, version: int | None, wheels: Path) -> Path:
    """The device libraries for an arch, the missing version constant assembled beside links to the rest."""
    if version is None:
        return BITCODE
    for source in BITCODE.glob("*.bc"):
        (into / source.name).symlink_to(source)
    constants = {f"oclc_isa_version_{arch[3:]}": ("ISA", version)}
    if arch == "gfx950":
        constants["oclc_abi_version_600"] = ("ABI", 600)
        for name in ("ocml.bc", "ockl.bc"):
            (into / name).unlink()
            (into / name).symlink_to(next(wheels.rglob(f"backends/amd/lib/{name}")))
    for name, (what, value) in constants.items():
        text = f"@__oclc_{what}_version = linkonce_odr hidden local_unnamed_addr addrspace(4) constant i32 {value}\n"
        subprocess.run(["llvm-as-19", "-", "-o", str(into / f"{name}.bc")], input=text, text=True, check=True)
    return into


def compiler(arch: str, libraries: Path, wheels: Path) -> list[str]:
    """The command of the device compiler, without source and output."""
    common = [
        "-x",
        "hip",
        "--rocm-path=/usr",
        f"--rocm-device-lib-path={libraries}",
        f"--offload-arch={arch}",
        "-O3",
        "-std=c++17",
        "-w",
    ]
    if arch != "gfx950":
        return ["clang++-19", *common, "--cuda-device-only"]
    zig, include = next(wheels.rglob("ziglang/zig")), next(wheels.rglob("backends/amd/include"))
    return [
        str(zig),
        "clang",
        *common,
        "-resource-dir",
        "/usr/lib/llvm-19/lib/clang/19",
        f"-I{include}",
        "--target=x86_64-linux-gnu",
        "--offload-device-only",
    ]


def linker(arch: str, wheels: Path) -> list[str]:
    return ["ld.lld-19"] if arch != "gfx950" else [str(next(wheels.rglob("ziglang/zig"))), "ld.lld"]


def kernels_of(assembly: str) -> dict[str, tuple[str, str]]:
    """Mangled name -> (its code, its metadata)."""
    found = {}
    for entry in re.split(r"\n  - \.agpr_count", assembly[assembly.index("amdhsa.kernels:") :])[1:]:
        name = re.search(r"\.name: +(\S+)", entry)[1]
        code = re.search(rf"^{re.escape(name)}:.*?\.end_amdhsa_kernel", assembly, re.M | re.S)[0]
        found[name] = (code, entry)
    return found


def streaming_loops(code: str) -> list[str]:
    """Blocks of the code between a label and a branch back to it that stream weights (non-temporal wide loads)."""
    lines, loops, labels = code.splitlines(), [], {}
    for at, line in enumerate(lines):
        if label := re.match(r"(\.LBB\S+):", line):
            labels[label[1]] = at
        elif (branch := re.search(r"s_c?branch\S*\s+(\.LBB\S+)", line)) and branch[1] in labels:
            loops.append("\n".join(lines[labels[branch[1]] : at]))
    return loops


def faults(arch: str, name: str, code: str, entry: str) -> tuple[Figures, list[str]]:
    """A kernel's figures, and what is wrong with it whatever the table says."""
    number = {
        key: int(re.search(rf"\.{key}: +(\d+)", entry)[1])
        for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    }
    vgprs = number["vgpr_count"]
    bad = []
    if number["vgpr_spill_count"] or number["private_segment_fixed_size"]:
        bad.append(
            f"{number['vgpr_spill_count']} vector registers spilled, "
            f"{number['private_segment_fixed_size']} bytes of scratch"
        )
    type_ = "F16" if re.search(r"3F16", name) else "Bf16"
    meant = MEANT[arch, type_] if "5Plain" in name or type_ == "F16" else STAGED_BF16[arch]
    wide = r"global_load_dwordx2" if "Int8ILi2" in name else r"global_load_dwordx4"
    if not any(re.search(meant, loop) and re.search(wide, loop) for loop in streaming_loops(code)):
        bad.append(f"no loop with both {meant} and {wide}")
    return Figures(vgprs, number["sgpr_spill_count"], min(8, 512 // -(-vgprs // 8 * 8))), bad


def build(arch: str, kernel: str, command: list[str], wheels: Path, folder: Path) -> str:
    """Assembly of one source; raises CalledProcessError where it does not compile or link."""
    source, out = str(SOURCES / f"{kernel}.hip"), folder / f"{kernel}.{arch}"
    subprocess.run([*command, "-S", source, "-o", f"{out}.s"], check=True)
    target = [*linker(arch, wheels), "-shared", "--no-undefined", f"{out}.o", "-o", f"{out}.so"]
    cc = ["clang-19", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    if arch == "gfx950":
        cc = [str(next(wheels.rglob("ziglang/zig"))), "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    subprocess.run([*cc, "-c", "-x", "assembler", f"{out}.s", "-o", f"{out}.o"], check=True)
    subprocess.run(target, check=True)
    return Path(f"{out}.s").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="write the table instead of holding the build to it")
    options = parser.parse_args()
    held = {} if options.write else json.loads(TABLE.read_text())
    found: dict[str, dict[str, int]] = {}
    bad = []
    with tempfile.TemporaryDirectory() as name:
        for arch, version in ARCHS.items():
            (libraries := Path(name) / arch).mkdir()
            command = compiler(arch, device_libraries(libraries, arch, version, options.wheels), options.wheels)
            for kernel in KERNELS:
                for symbol, (code, entry) in kernels_of(
                    build(arch, kernel, command, options.wheels, Path(name))
                ).items():
                    figures, wrong = faults(arch, symbol, code, entry)
                    key = f"{arch} {symbol}"
                    found[key] = asdict(figures)
                    ceiling = held.get(key)
                    if not options.write and ceiling is None:
                        wrong.append("not in the table")
                    elif ceiling and (
                        figures.vgprs > ceiling["vgprs"]
                        or figures.sgpr_spills > ceiling["sgpr_spills"]
                        or figures.waves < ceiling["waves"]
                    ):
                        wrong.append(f"{asdict(figures)} against {ceiling}")
                    bad += [f"{key}: {line}" for line in wrong]
                print(f"{arch} {kernel}: compiled and linked", flush=True)
    if options.write:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(bad))
    print(
        f"{len(found)} kernels, {len(bad)} faults; "
        f"scalar spills at most {max(f['sgpr_spills'] for f in found.values())}"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
