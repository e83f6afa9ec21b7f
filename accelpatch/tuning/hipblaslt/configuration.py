"""A tuning configuration of one GEMM, as TensileLite takes it for an arch of AMD.

Keys and forms are those of ROCm/rocm-libraries, projects/hipblaslt: tensilelite/Tensile/Tests/common/gemm/bf16_tn.yaml;
names of schedules and devices those of its library logic. MatrixInstruction is [M, N, K, blocks, blocks along M, tiles
of a wave along M and N, waves along M and N]; its macro tile is M * tiles * waves in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accelpatch.device import CDNA2, CDNA3, CDNA4, facts_of
from accelpatch.errors import AccelpatchError

from .gemms import MIXED, TYPES, Gemm, least_leading
from .space import Space, Value, from_fork, to_fork

GROUPS = ((4, 1), (2, 2), (1, 4))  # waves of a work-group along M and N
TILES = (1, 2, 3, 4, 5, 6, 8)  # matrix instructions of a wave along M and N
LARGEST_TILE = 256
Instruction = tuple[int, int, int, int]


@dataclass(frozen=True)
class Target:
    """What TensileLite needs to know of an arch. schedule, devices: of its library logic. units: CUs of a common card.
    instructions: TensileLite's symbol of a data type -> matrix instructions."""

    schedule: str
    devices: tuple[str, ...]
    units: int
    instructions: Mapping[str, tuple[Instruction, ...]]


_SINGLE: tuple[Instruction, ...] = ((16, 16, 4, 1), (32, 32, 2, 1))
_HALF: tuple[Instruction, ...] = ((16, 16, 16, 1), (32, 32, 8, 1))
_WIDE: tuple[Instruction, ...] = ((16, 16, 32, 1), (32, 32, 16, 1))
_WIDEST: tuple[Instruction, ...] = ((16, 16, 128, 1), (32, 32, 64, 1))
_COMMON: dict[str, tuple[Instruction, ...]] = {"S": _SINGLE, "D": ((16, 16, 4, 1),)}
TARGETS: Mapping[str, Target] = {
    CDNA2: Target(
        "aldebaran", ("Device 0050", "Device 0051", "Device 0052", "Device 0054", "Device 0062", "Device 7400",
                      "Device 740c"),
        104, {**_COMMON, "H": _HALF, "B": _HALF, "I8": _HALF},
    ),
    CDNA3: Target(
        "aquavanjaram", ("Device 0049", "Device 0050"), 304,
        {**_COMMON, "H": _HALF, "B": _HALF, **dict.fromkeys(("I8", "F8N", "B8N", "F8B8N", "B8F8N"), _WIDE)},
    ),
    CDNA4: Target(
        CDNA4, ("Device 75a0",), 256,
        {**_COMMON, "H": _WIDE, "B": _WIDE, "I8": _WIDE, **dict.fromkeys(("F8", "B8", "F8B8", "B8F8"), _WIDEST)},
    ),
}  # fmt: skip


def target_of(arch: str) -> Target:
    """What is known of an arch. Raises AccelpatchError for one that no configuration can be written for."""
    if arch not in TARGETS:
        raise AccelpatchError(f"no tuning configuration is known for the arch {arch}; known are: {', '.join(TARGETS)}")
    return TARGETS[arch]


def why_not(gemm: Gemm, arch: str) -> str | None:
    """Why no configuration can be written for a GEMM on an arch; None where one can."""
    if gemm.data_symbol in target_of(arch).instructions:
        return None
    facts, form = facts_of(arch), "e4m3fnuz" if "fnuz" in gemm.a_type else "e4m3fn"
    if facts is not None and TYPES[gemm.a_type].size == 1 and (reason := facts.why_not_fp8(form)):
        return f"A of {gemm.a_type}: {reason}"
    return f"no matrix instructions of {arch} are listed for A of {gemm.a_type} and B of {gemm.b_type}"


def space_of(gemm: Gemm, arch: str) -> Space:
    """The parameters of TensileLite that a search may choose for a GEMM, and their values."""
    size = TYPES[gemm.a_type].size
    depth = 64 if size <= 1 else 32 if size <= 2 else 16
    splits = tuple(one for one in (1, 2, 4, 8, 16) if one == 1 or gemm.k // one >= 512)
    values: dict[str, tuple[Value, ...]] = {
        "MatrixInstruction": tuple(_matrix_instructions(gemm, target_of(arch))),
        "DepthU": (depth, 2 * depth, 4 * depth),
        "PrefetchGlobalRead": (1, 2),
        "PrefetchLocalRead": (1,),
        "ClusterLocalRead": (1,),
        "LocalReadVectorWidth": (-1,),
        "ScheduleIterAlg": (3,),
        "ExpandPointerSwap": (0,),
        "TransposeLDS": (0, 1),
        "LdsBlockSizePerPadA": (-1,),
        "LdsBlockSizePerPadB": (-1,),
        "LdsPadA": (-1,),
        "LdsPadB": (-1,),
        "1LDSBuffer": (0, 1),
        "GlobalSplitU": splits,
        "GlobalSplitUAlgorithm": ("MultipleBuffer",),
        "SourceSwap": (0, 1),
        "WorkGroupMapping": (1, 4, 8, 16),
        "StaggerU": (0, 8, 32),
    }
    return Space(values)


def _matrix_instructions(gemm: Gemm, target: Target) -> list[tuple[int, ...]]:
    """Those whose macro tile is no larger than LARGEST_TILE and than the problem needs."""
    found: list[tuple[int, ...]] = []
    for m, n, k, blocks in target.instructions[gemm.data_symbol]:
        for across, down in GROUPS:
            for wide in TILES:
                for high in TILES:
                    tile = m * wide * across, n * high * down
                    most = max(gemm.m, m * across), max(gemm.n, n * down)
                    fits = all(one <= LARGEST_TILE and one < 2 * limit for one, limit in zip(tile, most, strict=True))
                    if fits:
                        found.append((m, n, k, blocks, 1, wide, high, across, down))
    return found


def macro_tile(instruction: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of D that a work-group with this MatrixInstruction computes."""
    m, n, _, _, _, wide, high, across, down = instruction
    return m * wide * across, n * high * down


def document(gemm: Gemm, arch: str) -> dict[str, Any]:
    """The configuration of a GEMM as TensileLite takes it."""
    target = target_of(arch)
    size = [gemm.m, gemm.n, gemm.batch, gemm.k]
    if gemm.leading != least_leading(gemm.trans_a, gemm.trans_b, gemm.m, gemm.n, gemm.k):
        a, b, c, d = gemm.leading
        size += [d, c, a, b]
    bias = gemm.d_type if TYPES[gemm.d_type].size > 1 else "f32_r"
    final: list[dict[str, Any]] = [{"ProblemSizes": [{"Exact": size}]}, {"BiasTypeArgs": [TYPES[bias].symbol]}]
    group = {
        "InitialSolutionParameters": None,
        "BenchmarkCommonParameters": [{"KernelLanguage": ["Assembly"]}],
        "ForkParameters": to_fork(space_of(gemm, arch)),
        "BenchmarkJoinParameters": None,
        "BenchmarkFinalParameters": final,
    }
    return {
        "GlobalParameters": {
            "MinimumRequiredVersion": "5.0.0", "SleepPercent": 50, "NumElementsToValidate": 128, "KernelTime": True,
            "DataInitTypeBeta": 0, "DataInitTypeAlpha": 1, "NewClient": 2, "CSVExportWinner": 1,
            "CSVMergeSameProblemID": 1, "RotatingBufferSize": 512, "Device": 0,
        },
        "BenchmarkProblems": [[problem_type(gemm), group]],
        "LibraryLogic": {
            "ScheduleName": target.schedule, "DeviceNames": list(target.devices), "ArchitectureName": arch,
        },
    }  # fmt: skip


def problem_type(gemm: Gemm) -> dict[str, Any]:
    """TensileLite's ProblemType: with bias, activation and scales, so that one kernel serves every epilogue."""
    found: dict[str, Any] = {
        "OperationType": "GEMM", "DataType": gemm.data_symbol, "DestDataType": TYPES[gemm.d_type].symbol,
        "ComputeDataType": TYPES[gemm.compute_type].symbol,
        "HighPrecisionAccumulate": gemm.a_type != gemm.compute_type, "TransposeA": gemm.trans_a == "T",
        "TransposeB": gemm.trans_b == "T", "UseBeta": True, "Batched": True,
    }  # fmt: skip
    if gemm.data_symbol != "D":
        found |= {"UseBias": 1, "Activation": True, "ActivationType": "hipblaslt_all", "UseScaleAlphaVec": 1}
    if TYPES[gemm.a_type].size == 1 and gemm.data_symbol != "I8":
        found["UseScaleAB"] = "Scalar"
    return found


@dataclass(frozen=True)
class Configuration:
    """A configuration that was read. name: that of its file. space: its ForkParameters. problem: its ProblemType."""

    name: str
    arch: str
    problem: Mapping[str, Any]
    size: tuple[int, ...]
    space: Space
    document: Mapping[str, Any]


def read(file: Path) -> Configuration:
    """A configuration, as it was written or as a user changed it. Raises AccelpatchError for one that is of another
    form: one problem with one Exact size and its ForkParameters."""
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER)
        ((problem, group),) = found["BenchmarkProblems"]
        (exact,) = group["BenchmarkFinalParameters"][0]["ProblemSizes"]
        size = tuple(int(one) for one in exact["Exact"])
        if len(size) not in (4, 8) or not isinstance(problem, dict):
            raise ValueError("its size is not [m, n, batch, k]")
        arch = str(found["LibraryLogic"]["ArchitectureName"])
        return Configuration(file.stem, arch, problem, size, from_fork(group["ForkParameters"]), found)
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise AccelpatchError(
            f"{file} is no tuning configuration of one GEMM ({type(error).__name__}: {why:.120}); "
            "`accelpatch tune hipblaslt configs` writes them"
        ) from None


def with_choice(found: Mapping[str, Any], fork: list[dict[str, list[Any]]]) -> dict[str, Any]:
    """A copy of a configuration's document with other ForkParameters."""
    ((problem, group),) = found["BenchmarkProblems"]
    return {**found, "BenchmarkProblems": [[dict(problem), {**group, "ForkParameters": fork}]]}


def text(found: Mapping[str, Any]) -> str:
    """A document as YAML, lists of values on one line each."""
    return str(yaml.dump(dict(found), Dumper=DUMPER, sort_keys=False, default_flow_style=None, width=110))


LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
SYMBOLS = {one.symbol: name for name, one in TYPES.items()} | {symbol: pair[0] for pair, symbol in MIXED.items()}
