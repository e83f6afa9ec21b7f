"""Compiles every HIP kernel for gfx90a, gfx942 and gfx950 without a GPU; reads the assembly against a checked-in table.

    python scripts/amd_gate.py --wheels DIR [--all] [--write]

DIR holds the unpacked `triton` and `ziglang` wheels (``triton/``, ``ziglang/`` or ``zig/ziglang/`` somewhere below it).
Needs clang-19, lld-19, llvm-19, libamdhip64-dev, rocm-device-libs. `make gate` installs all that and runs this. The
table has a digest of everything that a source's figures follow from: what has not changed since is not compiled again,
but with --all, as `make gate-all` does. Where all is well and a changed source has the figures that the table says, its
new digest is written there, to be committed; with CI=true nothing is. Says nothing about speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accelpatch.kernels.compiling import occupancy, resources
from accelpatch.kernels.compiling.occupancy import Resources

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "accelpatch/kernels/hip"
TABLE = ROOT / "scripts/amd_gate.json"
KERNELS = (
    "gemv",
    "gemv_int8",
    "gemv_int4",
    "gemv_int4_32",
    "gemv_int4_64",
    "gemv_int3",
    "gemv_low_rank",
    "gemv_int8_low_rank",
    "gemv_int4_low_rank",
    "gemv_int4_32_low_rank",
    "gemv_int4_64_low_rank",
    "gemv_fp8",
    "gemv_w8a8",
    "gemv_w8a8_fp8",
    "gemv_compact",
    "experts_int4",
    "experts_int4_32",
    "experts_int4_64",
    "int4_gemm",
    "decode_attention",
    "decode_attention_int8",
    "decode_attention_fp8",
    "push_all_reduce",
)
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
# int8 and int4 weights multiply as bytes, and so do int8 activations.
MEANT_INTEGER = {
    "gfx90a": r"v_mfma_i32_16x16x16i8",
    "gfx942": r"v_mfma_i32_16x16x32_i8",
    "gfx950": r"v_mfma_i32_16x16x32_i8",
}
# 8-bit floats multiply as they are where they have the arch's form (fnuz: 1), and else as fp16.
MEANT_FP8 = {
    ("gfx90a", "0"): r"v_mfma_f32_16x16x16f16",
    ("gfx90a", "1"): r"v_mfma_f32_16x16x16f16",
    ("gfx942", "0"): r"v_mfma_f32_16x16x16_f16",
    ("gfx942", "1"): r"v_mfma_f32_16x16x32_fp8_fp8",
    ("gfx950", "0"): r"v_mfma_f32_16x16x32_fp8_fp8",
    ("gfx950", "1"): r"v_mfma_f32_16x16x16_f16",
}
NOT_HELD = "not in the table"
CEILINGS = {"vgprs": "at most", "sgpr_spills": "at most", "lds": "at most", "waves": "at least"}


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


def code_of(name: str, assembly: str) -> str:
    """The instructions of one kernel."""
    found = re.search(rf"^{re.escape(name)}:.*?\.end_amdhsa_kernel", assembly, re.M | re.S)
    assert found is not None
    return found[0]


def figures(arch: str, taken: Resources) -> dict[str, int]:
    """What the table holds of a kernel. lds: bytes fixed at compile time; waves: resident on a SIMD with no more."""
    waves = occupancy.waves(arch, taken)
    return {"vgprs": taken.registers, "sgpr_spills": taken.scalar_spills, "lds": taken.shared, "waves": waves}


def streaming_loops(code: str) -> list[str]:
    """Blocks of the code between a label and a branch back to it that stream weights (non-temporal wide loads)."""
    lines, loops, labels = code.splitlines(), [], {}
    for at, line in enumerate(lines):
        if label := re.match(r"(\.LBB\S+):", line):
            labels[label[1]] = at
        elif (branch := re.search(r"s_c?branch\S*\s+(\.LBB\S+)", line)) and branch[1] in labels:
            loops.append("\n".join(lines[labels[branch[1]] : at]))
    return loops


def faults(arch: str, taken: Resources, code: str) -> list[str]:
    """What is wrong with a kernel whatever the table says."""
    bad = []
    if taken.vector_spills or taken.scratch:
        bad.append(f"{taken.vector_spills} vector registers spilled, {taken.scratch} bytes of scratch")
    if re.search("unpack_kernel|low_rank_kernel|push_all_reduce", taken.kernel):  # they multiply no weight
        return bad
    meant = MEANT[arch, "F16" if "3F16" in taken.kernel else "Bf16"]
    if "attention_kernel" in taken.kernel or "int4_gemm" in taken.kernel:
        meant = meant.replace("v_fma_mix_f32", "v_mfma_f32_16x16x16f16")
    if re.search(r"Int[348]I|Codebook4I|Nvfp4|W8A8", taken.kernel):
        meant = MEANT_INTEGER[arch]
    if fp8 := re.search(r"W8A8Fp8ILb(\d)", taken.kernel):
        meant = MEANT_FP8[arch, fp8[1]]
    wide = r"global_load_dwordx2" if re.search("Int8ILi2|Int3I", taken.kernel) else r"global_load_dwordx4"
    if not any(re.search(meant, loop) and re.search(wide, loop) for loop in streaming_loops(code)):
        bad.append(f"no loop with both {meant} and {wide}")
    return bad


def over(found: dict[str, int], held: dict[str, int] | None) -> list[str]:
    """What is worse than the table says."""
    if held is None:
        return [NOT_HELD]
    worse = {"at most": lambda now, then: now > then, "at least": lambda now, then: now < then}
    return [
        f"{key} is {found[key]}, {word} {held[key]} in the table"
        for key, word in CEILINGS.items()
        if worse[word](found[key], held[key])
    ]


def build(arch: str, source: Path, command: list[str], wheels: Path, out: Path) -> str:
    """Assembly of one source, beside `out`; raises CalledProcessError where it does not compile or link."""
    subprocess.run([*command, f"-I{SOURCES}", "-S", str(source), "-o", f"{out}.s"], check=True)
    target = [*linker(arch, wheels), "-shared", "--no-undefined", f"{out}.o", "-o", f"{out}.so"]
    cc = ["clang-19", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    if arch == "gfx950":
        cc = [str(next(wheels.rglob("ziglang/zig"))), "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    subprocess.run([*cc, "-c", "-x", "assembler", f"{out}.s", "-o", f"{out}.o"], check=True)
    subprocess.run(target, check=True)
    return Path(f"{out}.s").read_text()


def commands(wheels: Path, folder: Path) -> dict[str, list[str]]:
    """Arch -> the command of its compiler; the device libraries are put together in `folder`."""
    found = {}
    for arch, version in ARCHS.items():
        (libraries := folder / arch).mkdir()
        found[arch] = compiler(arch, device_libraries(libraries, arch, version, wheels), wheels)
    return found


def digest(command: list[str], libraries: Path, source: Path) -> str:
    """Of all that the figures of a source follow from: it and its headers, the compiler, its flags, the device
    libraries, and what reads the assembly."""
    text = subprocess.run([*command, f"-I{SOURCES}", "-E", "-P", str(source)], check=True, capture_output=True).stdout
    program = command[: command.index("-x")]
    version = subprocess.run([*program, "--version"], check=True, capture_output=True).stdout
    found = hashlib.sha256(version.partition(b"\n")[0] + text)
    found.update(" ".join(word for word in command if "/" not in word).encode())
    for one in (*sorted(libraries.glob("*.bc")), Path(__file__), Path(occupancy.__file__), Path(resources.__file__)):
        found.update(hashlib.sha256(one.read_bytes()).digest())
    return found.hexdigest()


def checked(wheels: Path, folder: Path, held: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table of what is here, and faults. A source whose digest the table has is taken from it, not compiled."""
    by_arch = commands(wheels, folder)

    def one(job: tuple[str, str]) -> tuple[str, dict[str, Any], list[str]]:
        arch, kernel = job
        key, source = f"{arch} {kernel}", next(SOURCES.rglob(f"{kernel}.hip"))
        of_inputs = digest(by_arch[arch], BITCODE if ARCHS[arch] is None else folder / arch, source)
        if key in held and held[key]["digest"] == of_inputs:
            return key, held[key], []
        assembly = build(arch, source, by_arch[arch], wheels, folder / f"{kernel}.{arch}")
        found, bad = examine(arch, assembly)
        before = held.get(key, {"kernels": {}})["kernels"]
        bad += [f"{name}: {line}" for name in found for line in over(found[name], before.get(name))]
        bad += [f"{name}: in the table, but no longer built" for name in before.keys() - found.keys()]
        return key, {"digest": of_inputs, "kernels": found}, [f"{arch} {line}" for line in bad]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(one, [(arch, kernel) for arch in ARCHS for kernel in KERNELS]))
    return {key: entry for key, entry, _ in made}, [line for _, _, lines in made for line in lines]


def examine(arch: str, assembly: str) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Figures of every kernel of a source, by its mangled name, and what is wrong with them in themselves."""
    found, bad = {}, []
    for name, taken in resources.of_assembly(assembly).items():
        found[name] = figures(arch, taken)
        bad += [f"{name}: {line}" for line in faults(arch, taken, code_of(name, assembly))]
    return found, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR",
                        help="The folder with the unpacked wheels of triton and ziglang.")  # fmt: skip
    parser.add_argument("--all", action="store_true",
                        help="Compile everything, what has not changed since the table was written too.")  # fmt: skip
    parser.add_argument("--write", action="store_true",
                        help="Write the table anew instead of holding the build to it.")  # fmt: skip
    options = parser.parse_args()
    held = json.loads(TABLE.read_text())
    known = {key: entry | {"digest": ""} for key, entry in held.items()} if options.all or options.write else held
    with tempfile.TemporaryDirectory() as name:
        found, lines = checked(options.wheels.resolve(), Path(name), {} if options.write else known)
    lines = [line for line in lines if not (options.write and line.endswith(NOT_HELD))]
    lines += [f"{key}: in the table, but no longer built" for key in held.keys() - found.keys() if not options.write]
    if options.write and not lines:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    elif not lines and os.environ.get("CI") != "true":  # digests of sources that have changed and their figures not
        kept = {key: found[key] if found.get(key, {}).get("kernels") == entry["kernels"] else entry
                for key, entry in held.items()}  # fmt: skip
        TABLE.write_text(json.dumps(kept, indent=1) + "\n")
    kernels = [taken for entry in found.values() for taken in entry["kernels"].values()]
    new = sum(found[key]["digest"] != known.get(key, {"digest": ""})["digest"] for key in found)
    print("\n".join([*lines, f"{new} of {len(found)} sources compiled, the others have not changed since the table"]))
    spills = max(taken["sgpr_spills"] for taken in kernels)
    print(f"{len(kernels)} kernels for {', '.join(ARCHS)}, {len(lines)} faults; scalar spills at most {spills}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
