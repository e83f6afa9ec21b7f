"""Assembly text of a program after register allocation: code object version 5, as clang writes it for HIP."""

from __future__ import annotations

from collections.abc import Sequence

from accelpatch.jit.ir import Instruction, Operand, Program
from accelpatch.jit.passes.allocation import Allocation
from accelpatch.jit.prologue import FIXED_SCALARS, kernarg_layout
from accelpatch.jit.types import Argument

WAVE = 64


def assembly(program: Program, allocation: Allocation, dimension: int) -> str:
    """The file for an assembler. dimension: the highest one of threadIdx that the kernel uses, 0 to 2."""
    name = program.name
    lines = [
        f'\t.amdgcn_target "amdgcn-amd-amdhsa--{program.arch}"', "\t.amdhsa_code_object_version 5", "\t.text",
        f"\t.protected\t{name}", f"\t.globl\t{name}", "\t.p2align\t8", f"\t.type\t{name},@function", f"{name}:",
    ]  # fmt: skip
    for block in program.blocks:
        lines.append(f"{_label(program, block.label)}:")
        lines += [_line(program, one, allocation) for one in block.instructions]
    lines += [f".Lend_{name}:", f"\t.size\t{name}, .Lend_{name}-{name}"]
    return "\n".join([*lines, *_descriptor(program, allocation, dimension), *_metadata(program, allocation), ""])


def _label(program: Program, label: str) -> str:
    return f".L{program.name}_{label}"


def _line(program: Program, one: Instruction, allocation: Allocation) -> str:
    words = [
        _label(program, str(operand)) if slot.kinds == "b" else _text(operand, allocation)
        for operand, slot in zip(one.operands, one.form.operands, strict=True)
    ]
    code = " ".join(filter(None, (one.name, ", ".join(words), one.mod)))
    return f"\t{code}\t// {one.line}"


def _text(operand: Operand, allocation: Allocation) -> str:
    if isinstance(operand, str):
        return operand
    file, first = operand.register.file, allocation.first[operand.register] + operand.first
    name = f"{file}{first}" if operand.dwords == 1 else f"{file}[{first}:{first + operand.dwords - 1}]"
    return {"": name, "-": f"-{name}", "|": f"|{name}|", "-|": f"-|{name}|"}[operand.sign]


def _accum_offset(allocation: Allocation) -> int:
    """Where accumulators begin in the register file that they share with the vector registers: a multiple of four."""
    return max(4, -(-allocation.used["v"] // 4) * 4)


def _descriptor(program: Program, allocation: Allocation, dimension: int) -> list[str]:
    used = allocation.used
    total = _accum_offset(allocation) + used["a"] if used["a"] else max(1, used["v"])
    settings = {
        "group_segment_fixed_size": program.lds, "private_segment_fixed_size": 0,
        "kernarg_size": kernarg_layout(program.arguments)[1], "user_sgpr_count": 2, "user_sgpr_kernarg_segment_ptr": 1,
        "system_sgpr_workgroup_id_x": 1, "system_sgpr_workgroup_id_y": 1, "system_sgpr_workgroup_id_z": 1,
        "system_vgpr_workitem_id": dimension, "next_free_vgpr": total,
        "next_free_sgpr": max(FIXED_SCALARS, used["s"]), "accum_offset": _accum_offset(allocation), "reserve_vcc": 1,
        "float_round_mode_32": 0, "float_round_mode_16_64": 0, "float_denorm_mode_32": 3,
        "float_denorm_mode_16_64": 3, "dx10_clamp": 1, "ieee_mode": 1,
    }  # fmt: skip
    return [
        '\t.section\t.rodata,"a",@progbits', "\t.p2align\t6, 0x0", f"\t.amdhsa_kernel {program.name}",
        *(f"\t\t.amdhsa_{key} {value}" for key, value in settings.items()), "\t.end_amdhsa_kernel", "\t.text",
    ]  # fmt: skip


def _metadata(program: Program, allocation: Allocation) -> list[str]:
    used = allocation.used
    offsets, size = kernarg_layout(program.arguments)
    return [
        "\t.amdgpu_metadata", "---", "amdhsa.kernels:", f"  - .agpr_count:     {used['a']}",
        *_arguments(program.arguments, offsets),
        f"    .group_segment_fixed_size: {program.lds}", "    .kernarg_segment_align: 8",
        f"    .kernarg_segment_size: {size}", f"    .max_flat_workgroup_size: {program.threads}",
        f"    .name:           '{program.name}'", "    .private_segment_fixed_size: 0",
        f"    .sgpr_count:     {max(FIXED_SCALARS, used['s']) + 6}", "    .sgpr_spill_count: 0",
        f"    .symbol:         '{program.name}.kd'", "    .uniform_work_group_size: 1",
        f"    .vgpr_count:     {_accum_offset(allocation) + used['a'] if used['a'] else used['v']}",
        "    .vgpr_spill_count: 0", f"    .wavefront_size: {WAVE}",
        f"amdhsa.target:   amdgcn-amd-amdhsa--{program.arch}", "amdhsa.version:", "  - 1", "  - 2", "...",
        "\t.end_amdgpu_metadata",
    ]  # fmt: skip


def _arguments(arguments: Sequence[Argument], offsets: Sequence[int]) -> list[str]:
    lines = ["    .args:"] if arguments else ["    .args:           []"]
    for one, offset in zip(arguments, offsets, strict=True):
        lines += ["      - .address_space:  global"] if one.pointer else []
        lines += [f"      {' ' if one.pointer else '-'} .offset:         {offset}",
                  f"        .size:           {one.bytes}",
                  f"        .value_kind:     {one.kind}"]  # fmt: skip
    return lines
