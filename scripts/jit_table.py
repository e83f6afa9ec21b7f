"""Makes the jit's instruction table anew, from AMD's machine-readable ISA and what the assemblers say of each arch.

    pip download --no-deps --dest DIR tinygrad==0.14.0 && unzip -d DIR/tinygrad DIR/tinygrad-*.whl
    python scripts/jit_table.py --isa DIR/tinygrad --wheels .venv/gate

Names, operands and their sizes come from tinygrad's tables (MIT licence), which its authors generate from the XML files
and the pseudo code of AMD's CDNA ISA. Which arch has an instruction is what the assembler of LLVM says: llvm-mc-19 for
gfx90a and gfx942, clang of the ziglang wheel for gfx950. An instruction that none of them takes is left out and named.
The format of the table is that of accelpatch/jit/table/__init__.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.jit_assembly import ARCHS, refused, sample

from accelpatch.jit.table import Form, Slot, parse

TABLE = Path(__file__).parent.parent / "accelpatch/jit/table/instructions.txt"
HEAD = """\
Instructions of gfx90a, gfx942 and gfx950; scripts/jit_table.py makes this file anew and says from what. The operands
are data of AMD's machine-readable ISA by way of tinygrad 0.14.0, which has this licence:

"""
#: operand class of the ISA -> what may stand there: v a s registers, i inline constant, l literal, n number or text of
#: its own, o the word off, b a label
KINDS = {
    "OPR_VGPR": "v", "OPR_SRC_VGPR": "v", "OPR_VGPR_OR_LDS": "v", "OPR_VGPR_OR_ACCVGPR": "va", "OPR_ACCVGPR": "a",
    "OPR_SRC_ACCVGPR": "a", "OPR_SRC_VGPR_OR_ACCVGPR": "va", "OPR_SRC_VGPR_OR_ACCVGPR_OR_CONST": "vai",
    "OPR_SRC": "vsil", "OPR_SRC_NOLIT": "vsi", "OPR_SRC_NOLDS": "vsil", "OPR_SRC_SIMPLE": "vsi", "OPR_SREG": "s",
    "OPR_SREG_NOVCC": "s", "OPR_SDST": "s", "OPR_SSRC": "sil", "OPR_SSRC_NOLIT": "si", "OPR_SSRC_LANESEL": "si",
    "OPR_SMEM_OFFSET": "sn", "OPR_SIMM16": "n", "OPR_SIMM8": "n", "OPR_SIMM4": "n", "OPR_HWREG": "n",
    "OPR_SENDMSG": "n", "OPR_WAITCNT": "n", "OPR_LABEL": "b",
}  # fmt: skip
UNITS = {
    "SOP1Op": "salu", "SOP2Op": "salu", "SOPCOp": "salu", "SOPKOp": "salu", "SOPPOp": "control", "SMEMOp": "smem",
    "VOP1Op": "valu", "VOP2Op": "valu", "VOP3Op": "valu", "VOP3SDOp": "valu", "VOP3POp": "valu", "VOP3PX2Op": "valu",
    "VOPCOp": "valu", "DSOp": "ds", "FLATOp": "flat", "GLOBALOp": "global", "SCRATCHOp": "scratch", "MUBUFOp": "buffer",
    "MTBUFOp": "buffer",
}  # fmt: skip
#: the order in which assembly names an instruction's fields
ORDER = (
    "vdst", "sdst", "sdata", "vdata", "vaddr", "addr", "data0", "data1", "data", "saddr", "srsrc", "soffset_of_buffer",
    "sbase", "src0", "vsrc1", "src1", "src2", "ssrc0", "ssrc1", "soffset", "simm16", "scale_src0", "scale_src1",
)  # fmt: skip
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(f|legacy_f)(16|32|64)")
#: MFMA of gfx90a that later archs lack, and the one float form that gfx942 alone has; the ISA's file is of the newest
MATRIX = {
    "v_mfma_f32_32x32x2bf16": (32, 1, 1), "v_mfma_f32_16x16x2bf16": (16, 1, 1), "v_mfma_f32_4x4x2bf16": (4, 1, 1),
    "v_mfma_f32_32x32x4bf16": (16, 1, 1), "v_mfma_f32_16x16x8bf16": (4, 1, 1), "v_mfma_i32_32x32x8i8": (16, 1, 1),
    "v_mfma_i32_16x16x16i8": (4, 1, 1), "v_mfma_f32_16x16x8_xf32": (4, 2, 2), "v_mfma_f32_32x32x4_xf32": (16, 2, 2),
    "v_mfma_f32_16x16x8xf32": (4, 2, 2), "v_mfma_f32_32x32x4xf32": (16, 2, 2),
}  # fmt: skip
#: what else the ISA's file, which is of the newest arch, does not have and an older one does
MORE = (
    "v_mac_f32 valu a short > +v1 vsil1 vsi1",
    "v_mad_f32 valu a - > =v1 vsi1 vsi1 vsi1",
    "v_mad_legacy_f32 valu a - > =v1 vsi1 vsi1 vsi1",
    "v_mul_lo_i32 valu a - > =v1 vsi1 vsi1",
    "v_madak_f32 valu a short > =v1 vsil1 v1 l1",
    "v_madmk_f32 valu a short > =v1 vsil1 l1 v1",
    "ds_gws_init ds a store m0> v1",
    "ds_gws_barrier ds a store m0> v1",
    "ds_gws_sema_br ds a store m0> v1",
    "buffer_wbinvl1 buffer a store >",
    "buffer_wbinvl1_vol buffer a store >",
    "buffer_invl2 buffer a store >",
)


@dataclass
class Encoding:
    """One encoding of an instruction, as the ISA's file has it."""

    unit: str
    fields: dict[str, tuple[int, str]]  # bits, operand class
    code: str
    short: bool


def encodings(isa: Path) -> dict[str, list[Encoding]]:
    """Mnemonic -> its encodings."""
    sys.path.insert(0, str(isa))
    from tinygrad.runtime.autogen.amd.cdna import enum
    from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS
    from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

    found: dict[str, list[Encoding]] = {}
    # The file lists no operands for instructions that have none.
    plain = {operation: {} for kind in (enum.SOPPOp, enum.SMEMOp, enum.VOP1Op, enum.DSOp, enum.MUBUFOp)
             for operation in kind if operation not in OPERANDS}  # fmt: skip
    for operation, fields in (OPERANDS | plain).items():
        name = re.sub(r"_e(32|64)$", "", operation.name.lower())
        if name.startswith(("tbuffer", "scratch_load_lds")):
            continue  # typed buffers are for textures; a kernel of the jit has no scratch memory
        encoding = type(operation).__name__
        short = encoding in ("VOP1Op", "VOP2Op", "VOPCOp")
        kinds = {key: (bits, kind.name) for key, (_, bits, kind) in fields.items()}
        found.setdefault(name, []).append(Encoding(UNITS[encoding], kinds, PCODE.get(operation, ""), short))
    return found


def written(name: str, key: str, code: str) -> str:
    """How a field is used: "=" written, "+" written in part, or read as well, "" read."""
    if key not in ("vdst", "sdst", "sdata", "vdata") or name.startswith("s_cmpk"):
        return ""
    if re.search(r"store|s_setreg|s_atc|s_scratch|s_dcache|s_cbranch_i", name) or ("atomic" in name and key != "vdst"):
        return "+" if "atomic" in name else ""
    partly = re.search(r"_d16|writelane|v_swap|permlane\d+_swap|s_cmov|s_bitset|mixlo|mixhi|s_addk|s_mulk|_sr_", name)
    partly = partly or re.search(
        r"preserved|[=+(,] *(?:fma\(.*)?D0\.|D0\.\w+ [-+*]=", code.replace("D0.u64[laneId]", "")
    )
    return "+" if partly or re.search(r"v_(fmac|mac|dot\dc|pk_fmac)_|v_smfmac|v_cvt_(sr|pk)_.*(fp8|bf8)", name) else "="


def operand(name: str, key: str, bits: int, kind: str, code: str) -> Slot:
    dwords = (-(-bits // 32),)
    kinds = KINDS[kind]
    if kinds in ("n", "b"):
        dwords = (0,)
    if key == "saddr":
        kinds = "so"
    if key == "addr" and name.startswith(("global_", "scratch_")):
        kinds, dwords = ("v", (1, 2)) if name.startswith("global_") else ("vo", (1,))
    if key == "vaddr":
        kinds, dwords = "vo", (1, 2)
    if key == "saddr" and name.startswith("scratch_"):
        dwords = (1,)
    return Slot(written(name, key, code), kinds, dwords)


def implicit(name: str, code: str, unit: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Registers that an instruction reads and writes without naming them."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("//")]
    writes = {"scc"} if any(re.match(r"\s*SCC\s*=", line) for line in lines) else set()
    rest = "\n".join(re.sub(r"^\s*SCC\s*=(?!=)", "", line) for line in lines)
    reads = {"scc"} if unit in ("salu", "control") and re.search(r"\bSCC\b", rest) and "scc" not in name else set()
    if name in ("s_cbranch_scc0", "s_cbranch_scc1"):
        reads.add("scc")
    if name.startswith("v_div_fmas") or "vcc" in name:
        reads.add("vcc")
    if "saveexec" in name or "wrexec" in name or name.startswith("v_cmpx"):
        writes.add("exec")
        reads |= {"exec"} if "exec" in name else set()
    if "execz" in name or "execnz" in name:
        reads.add("exec")
    if ("_lds_" in name and unit == "global") or "addtid" in name or "movrel" in name:
        reads.add("m0")
    if name in ("s_sendmsg", "s_sendmsghalt", "ds_consume", "ds_append") or "_gws_" in name:
        reads.add("m0")
    return tuple(sorted(reads)), tuple(sorted(writes))


def flags(name: str, unit: str, short: bool) -> tuple[str, ...]:
    found = {"short"} if short else set()
    if unit in ("smem", "ds", "flat", "global", "scratch", "buffer"):
        reads = re.search(r"load|ds_read|_rtn_|permute|swizzle|memtime|memrealtime|ds_consume|ds_append", name)
        found.add("load" if reads and "_lds_" not in name else "store")
    return tuple(sorted(found))


def instruction(name: str, several: list[Encoding]) -> Form:
    """One entry out of all encodings of a mnemonic; its archs are still empty."""
    widest = max(several, key=lambda form: (len(form.fields), not form.short))
    short = next((form for form in several if form.short), None)
    keys = sorted(widest.fields, key=lambda key: ORDER.index("soffset_of_buffer" if key == "soffset" and
                  widest.unit == "buffer" else key))  # fmt: skip
    if widest.unit == "buffer" and keys:
        keys = ["vdata", "vaddr", "srsrc", "soffset"]
    if widest.unit in ("flat", "global", "scratch") and "store" in name:
        keys = [key for key in ("addr", "data", "saddr") if key in keys]
    if "load_lds" in name:
        keys.remove("vdst")
    if name == "s_setreg_b32":
        keys = ["simm16", "sdst"]
    code = widest.code or next((form.code for form in several if form.code), "")
    operands = [operand(name, key, *widest.fields[key], code) for key in keys]
    if short and "src0" in keys and short.fields.get("src0", (0, ""))[1] == "OPR_SRC":
        at = keys.index("src0")
        operands[at] = Slot("", "vsil", operands[at].dwords)
    if name in ("v_fmaak_f32", "v_madak_f16"):
        operands.append(Slot("", "l", (1,)))
    if name in ("v_fmamk_f32", "v_madmk_f16"):
        operands.insert(2, Slot("", "l", (1,)))
    if name == "s_setreg_imm32_b32":
        operands.append(Slot("", "l", (1,)))
    if widest.unit == "scratch" and "store" in name:
        operands[0] = Slot("", "vo", (1,))
    if name.startswith("v_swap_") or re.match(r"v_permlane\d+_swap", name):
        operands[1] = Slot("+", "v", operands[1].dwords)
    unit = "trans" if TRANSCENDENTAL.fullmatch(name) else widest.unit
    unit = "matrix" if name.startswith(("v_mfma", "v_smfmac")) else unit
    reads, writes = implicit(name, code, unit)
    return Form(name, unit, (), flags(name, unit, short is not None), reads, writes, tuple(operands))


def renamed(one: Form) -> Iterator[Form]:
    """An instruction by its names: gfx90a writes those of the matrix unit another way, and LLVM some of the rest."""
    yield one
    shape = re.fullmatch(r"(v_s?mfmac?_\w+?_\d+x\d+x\d+)(?:_\d+b)?_(f32|f16|bf16|i8|f64)", one.name)
    if shape and one.unit == "matrix":
        for last in (shape[2], "bf16_1k") if shape[2] == "bf16" else (shape[2],):
            yield one.renamed(shape[1] + last)
    if one.name.startswith("v_mad_mix"):
        yield one.renamed(one.name.replace("mad", "fma"))
    if one.unit == "buffer" and one.name.startswith("buffer_load") and "format" not in one.name:
        # With lds the data goes there, to the address in m0, and no register is named.
        yield Form(one.name, one.unit, (), ("lds", "store"), ("m0",), (), one.operands[1:])
    if one.name in ("v_accvgpr_read", "v_accvgpr_write"):
        yield one.renamed(f"{one.name}_b32")
    if "atomic" in one.name and one.unit in ("flat", "global") and one.operands[0].use:
        # Without glc (gfx942: sc0) an atomic returns nothing and has no destination.
        yield Form(one.name, one.unit, (), ("store",), one.reads, one.writes, one.operands[1:])


def matrix() -> Iterator[Form]:
    for name, (result, a, b) in MATRIX.items():
        operands = (Slot("=", "va", (result,)), Slot("", "va", (a,)), Slot("", "va", (b,)),
                    Slot("", "vai", (result,)))  # fmt: skip
        yield Form(name, "matrix", (), (), (), (), operands)


def table(isa: Path, wheels: Path) -> tuple[list[Form], list[str]]:
    """The instructions with their archs, and the names of those that no arch has."""
    entries = [
        entry for name, several in sorted(encodings(isa).items()) for entry in renamed(instruction(name, several))
    ]
    entries += [*matrix(), *map(parse, MORE)]
    lines = [sample(entry) for entry in entries]
    bad = {arch: refused(lines, arch, wheels) for arch in ARCHS}
    kept = [entry.on(tuple(arch for arch in ARCHS if at not in bad[arch])) for at, entry in enumerate(entries)]
    left = [f"{line}: {bad['gfx942'].get(at, '')}" for at, line in enumerate(lines) if not kept[at].archs]
    return [entry for entry in kept if entry.archs], left


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", type=Path, required=True, metavar="DIR", help="The unpacked wheel of tinygrad.")
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR", help="The unpacked wheel of ziglang.")
    options = parser.parse_args(arguments)
    kept, left = table(options.isa.resolve(), options.wheels.resolve())
    licence = next(options.isa.glob("tinygrad-*.dist-info/licenses/LICENSE")).read_text()
    head = (line for text in (HEAD + licence).splitlines() for line in textwrap.wrap(text, 118) or [""])
    lines = [f"# {line}".strip() for line in head] + sorted(entry.line() for entry in kept)
    TABLE.write_text("".join(f"{line}\n" for line in lines))
    print("\n".join(f"left out: {line}" for line in left))
    print(f"{len(kept)} instructions, {len(left)} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
