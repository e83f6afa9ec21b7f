"""Parses one line of a log, in each format that names a GEMM: the GEMM, or why it is left out. Nothing is executed.

Sources of the forms:
- hipBLASLt, HIPBLASLT_LOG_MASK 32 (a command of hipblaslt-bench a call), 64 (a YAML entry a problem, with its calls)
  and 128 (the same, with solution and kernel): ROCm/rocm-libraries, projects/hipblaslt/docs and utilities/geko.
- rocBLAS, ROCBLAS_LAYER 2 (a command of rocblas-bench) and 4 (a YAML entry): its programmer's guide, Logging.
- torch's TunableOp, GEMMs that it recorded or tuned: aten/src/ATen/cuda/tunable/GemmCommon.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .gemms import COMPUTE, TYPES, Gemm, least_leading, why_not

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,200}")
PAIR = re.compile(r"""([A-Za-z_]\w*)\s*:\s*['"]?([^,'"\s}]*)""")  # of a flow mapping of plain words
INTEGER = re.compile(r"-?[0-9]{1,12}")
PLAIN = {*TYPES, *COMPUTE, "c_f32_r", "N", "T"}
MOST_CALLS = 10**12  # no program makes more calls of one GEMM; a larger number is an error
TRANSPOSES = {"N": "N", "T": "T", "C": "T"}  # the conjugate transpose of a real matrix is its transpose
ROCBLAS_TYPES = {"h": "f16_r", "s": "f32_r", "d": "f64_r", "bf16": "bf16_r", "b": "bf16_r"}
TUNABLE_TYPES = {
    "double": "f64_r", "float": "f32_r", "tf32": "xf32_r", "Half": "f16_r", "BFloat16": "bf16_r",
    "Float8_e4m3fn": "f8_r", "Float8_e5m2": "bf8_r", "Float8_e4m3fnuz": "f8_fnuz_r", "Float8_e5m2fnuz": "bf8_fnuz_r",
}  # fmt: skip
_TYPE = "|".join(sorted(TUNABLE_TYPES, key=len, reverse=True))
TUNABLE = re.compile(
    rf"(?:Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_({_TYPE})(?:_({_TYPE})_({_TYPE}))?_([NT])([NT]),"
    r"[nt][nt]_([0-9]{1,12})_([0-9]{1,12})_([0-9]{1,12})(?:_B_([0-9]{1,12}))?"
    r"_ld_([0-9]{1,12})_([0-9]{1,12})_([0-9]{1,12})(?:[_,].*)?"
)


class LineError(Exception):
    """A line names a GEMM that cannot be used; the message says why."""


@dataclass(frozen=True)
class Call:
    """The GEMM of a line. epilogue: what follows the product, such as "bias, relu"; empty for none."""

    gemm: Gemm
    calls: int
    epilogue: str = ""


def form_of(line: str) -> str | None:
    """The form of a line, a key of FORMS; None where it names no GEMM."""
    if line.startswith("- {"):
        if "rocblas_function" in line:
            return "rocBLAS profile"
        return "hipBLASLt mask 64 or 128" if "function" in line and "matmul" in line else None
    if "hipblaslt-bench " in line:
        return "hipBLASLt mask 32"
    if "rocblas-bench " in line:
        return "rocBLAS bench"
    return "TunableOp" if "TunableOp_" in line[:40] else None


def parse(line: str, form: str) -> Call:
    """The Call of a line in a format. Raises LineError with the reason where it cannot be used."""
    return FORMS[form](line)


def _entry(line: str) -> dict[str, str]:
    """The keys and values of a YAML flow mapping of plain words; anything else is left out."""
    if not line.endswith("}"):
        raise LineError("the line is cut off")
    return dict(PAIR.findall(line))


def _words(line: str, program: str) -> dict[str, str]:
    """The options of a command line and their values; an option without one has an empty one."""
    options: dict[str, str] = {}
    last = ""
    for word in line.partition(program)[2].split():
        if word.startswith("-") and not INTEGER.fullmatch(word.partition(".")[0]):
            last = word
            options[last] = ""
        elif last and not options[last]:
            options[last] = word
        else:
            raise LineError(f"{word[:40]!a} belongs to no option")
    return options


def _number(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = values.get(name, "")
    if not text:
        if default is None:
            raise LineError(f"{name} is missing")
        return default
    if len(text) > 12 or not (text.isascii() and text.removeprefix("-").isdigit()):
        raise LineError(f"{name} is {text[:40]!a}, no integer")
    return int(text)


def _word(values: Mapping[str, str], name: str, default: str | None = None) -> str:
    text = values.get(name, "")
    if not text:
        if default is None:
            raise LineError(f"{name} is missing")
        return default
    if text not in PLAIN and not WORD.fullmatch(text):
        raise LineError(f"{name} is {text[:40]!a}, no name")
    return text


def _calls(values: Mapping[str, str]) -> int:
    calls = _number(values, "call_count", 1)
    if not 1 <= calls <= MOST_CALLS:
        raise LineError(f"call_count is {calls}")
    return calls


def _checked(gemm: Gemm) -> Gemm:
    if reason := why_not(gemm):
        raise LineError(reason)
    return gemm


def _gemm(
    values: Mapping[str, str], names: Mapping[str, str], types: Callable[[str], str], *, compute: str | None = None
) -> Gemm:
    """The problem of a line. names: what m, n, k, batch and the transposes are called there."""
    trans_a, trans_b = (TRANSPOSES.get(text := _word(values, names[name]), text) for name in ("transA", "transB"))
    m, n, k = (_number(values, names[name]) for name in ("m", "n", "k"))
    dense = least_leading(trans_a, trans_b, m, n, k)
    ld = names.get("ld", "ld")
    a, b, c, d = (_number(values, f"{ld}{one}", default) for one, default in zip("abcd", dense, strict=True))
    precision = values.get(names.get("precision", ""), "") or None
    prefix = names.get("types", "")
    a_type = types(_word(values, f"{prefix}a_type", precision))
    b_type, c_type = (types(_word(values, f"{prefix}{one}_type", precision or a_type)) for one in "bc")
    d_type = types(_word(values, f"{prefix}d_type", c_type))
    total = compute or types(_word(values, f"{prefix}compute_type", precision).removeprefix("c_"))
    batch = _number(values, names["batch"], 1)
    return _checked(Gemm(trans_a, trans_b, m, n, k, batch, a_type, b_type, c_type, d_type, total, (a, b, c, d)))


PROFILE = {"m": "M", "n": "N", "k": "K", "batch": "batch_count", "transA": "transA", "transB": "transB"}
BENCH = {
    "m": "-m", "n": "-n", "k": "-k", "batch": "--batch_count", "transA": "--transA", "transB": "--transB",
    "ld": "--ld", "types": "--", "precision": "-r",
}  # fmt: skip


def _on(values: Mapping[str, str], name: str) -> bool:
    """Whether a switch is set: given without a value, or with a value other than false, 0 and none."""
    return name in values and values[name].lower() not in ("false", "0", "none")


def _epilogue(values: Mapping[str, str], prefix: str = "") -> str:
    """What follows the product. Only known values of a log are named."""
    parts = ["bias"] if _on(values, f"{prefix}bias_vector") else []
    activation = values.get(f"{prefix}activation_type", "none").lower()
    parts += [activation] if activation in ("relu", "gelu", "swish", "clamp", "sigmoid") else []
    parts += [name for name in ("scaleA", "scaleB", "scaleC", "scaleD") if _on(values, f"{prefix}{name}")]
    parts += ["aux"] if _on(values, f"{prefix}use_e") else []
    return ", ".join(parts)


def _same(text: str) -> str:
    return text


def _mask_64(line: str) -> Call:
    values = _entry(line)
    if values.get("function") != "matmul":
        raise LineError(f"function is {values.get('function', '')[:40]!a}, not matmul")
    return Call(_gemm(values, PROFILE, _same), _calls(values), _epilogue(values))


def _mask_32(line: str) -> Call:
    values = _words(line, "hipblaslt-bench ")
    for long, short in (("--sizem", "-m"), ("--sizen", "-n"), ("--sizek", "-k"), ("--precision", "-r")):
        if long in values:
            values[short] = values[long]
    if _on(values, "--grouped_gemm"):
        raise LineError("a grouped GEMM: TensileLite tunes one problem at a time")
    return Call(_gemm(values, BENCH, _same), 1, _epilogue(values, "--"))


def _rocblas_type(text: str) -> str:
    return ROCBLAS_TYPES.get(text, text)


def _rocblas_profile(line: str) -> Call:
    values = _entry(line)
    name = values.get("rocblas_function", "")
    if not re.fullmatch(r"rocblas_([hsd]?gemm)(_strided_batched)?(_ex)?", name):
        raise LineError(f"{name[:60]!a} is no GEMM that hipBLASLt has")
    if "gemm_" not in name.partition("rocblas_")[2][:5]:  # rocblas_hgemm and the like name their type
        symbol = name.removeprefix("rocblas_")[0]
        values.setdefault("a_type", _rocblas_type(symbol))
        values.setdefault("compute_type", _rocblas_type(symbol))
    return Call(_gemm(values, PROFILE, _rocblas_type), _calls(values))


def _rocblas_bench(line: str) -> Call:
    values = _words(line, "rocblas-bench ")
    name = values.get("-f", "")
    if not re.fullmatch(r"gemm(_strided_batched)?(_ex)?", name):
        raise LineError(f"{name[:60]!a} is no GEMM that hipBLASLt has")
    names = {**BENCH, "transA": "--transposeA", "transB": "--transposeB"}
    return Call(_gemm(values, names, _rocblas_type), 1)


def _tunable(line: str) -> Call:
    found = TUNABLE.fullmatch(line)
    if not found:
        raise LineError("the line is cut off, or of another release of torch")
    a, b, c, trans_a, trans_b, m, n, k, batch, lda, ldb, ldc = found.groups()
    a_type, b_type, c_type = TUNABLE_TYPES[a], TUNABLE_TYPES[b or a], TUNABLE_TYPES[c or a]
    total = "f64_r" if a_type == "f64_r" else "xf32_r" if a_type == "xf32_r" else "f32_r"
    leading = (int(lda), int(ldb), int(ldc), int(ldc))
    gemm = Gemm(
        trans_a, trans_b, int(m), int(n), int(k), int(batch or 1), a_type, b_type, c_type, c_type, total, leading
    )
    return Call(_checked(gemm), 1, "bias" if line.startswith("GemmAndBias") else "")


FORMS: Mapping[str, Callable[[str], Call]] = {
    "hipBLASLt mask 32": _mask_32,
    "hipBLASLt mask 64 or 128": _mask_64,
    "rocBLAS bench": _rocblas_bench,
    "rocBLAS profile": _rocblas_profile,
    "TunableOp": _tunable,
}
