"""The libraries of a GPU: one for each function of its device sources, dtype and format.

Compilers take minutes for all of them. A model launches few, and its first patch compiles those alone, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

DTYPES = ("bf16", "fp16")  # of activations, numbered as in the C interface
OFFSETS = {"none": 0, "zero_point": 1, "minimum": 2}  # numbered as in gemv.h
GROUPS_OF_64 = {**OFFSETS, "nf4": 3, "fp4": 4}  # what groups of 32 and 64 may be besides
CODES = {**GROUPS_OF_64, "e2m1": 5, "nvfp4": 6}
INT3 = {f"g{128 // groups}_{name}": 10 * groups + one for groups in (1, 2, 4) for name, one in OFFSETS.items()}
EXPERT_OFFSETS = {name: OFFSETS[name] for name in ("none", "minimum")}
FP8 = {"e4m3fn": 0, "e4m3fnuz": 1}  # whether fnuz
FP8_BLOCKS = "e4m3fn_blocks"  # with a scale for each row and 128 values of K
WIDTHS = (64, 128, 256)  # columns of a head


@dataclass(frozen=True)
class Function:
    """A function of the C interface, less its prefix, and what it is compiled from.

    variants: name -> its number in the sources (ONLY_FORM of instances.h). dtypes: those of activations; of none or a
    single one, the name of the library does not say it.
    """

    sources: tuple[str, ...]
    variants: Mapping[str, int] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES


FUNCTIONS: Mapping[str, Function] = {
    "decode_attention": Function(
        ("attention/decode_attention.hip", "attention/decode_attention_one.hip"),
        {str(width): width for width in WIDTHS},
    ),
    **{
        f"decode_attention_{cache}": Function(
            (f"attention/decode_attention_{cache}.hip",), {str(width): width for width in WIDTHS}, ("bf16",)
        )
        for cache in ("int8", "fp8")  # formats of the KV cache
    },
    "gemv": Function(("gemv/gemv.hip",)),
    "gemv_int8": Function(("gemv/gemv_int8.hip",), {"rows": 0, "g32": 32, "g64": 64}),
    "gemv_int4": Function(("gemv/gemv_int4.hip",), OFFSETS),
    "gemv_int4_32": Function(("gemv/gemv_int4_32.hip",), CODES),
    "gemv_int4_64": Function(("gemv/gemv_int4_64.hip",), GROUPS_OF_64),
    "gemv_int3": Function(("gemv/gemv_int3.hip",), INT3),
    # with LoRA inside
    "gemv_low_rank": Function(("gemv/gemv_low_rank.hip",)),
    "gemv_int8_low_rank": Function(("gemv/gemv_int8_low_rank.hip",), {"rows": 0, "g32": 32, "g64": 64}),
    "gemv_int4_low_rank": Function(("gemv/gemv_int4_low_rank.hip",), OFFSETS),
    "gemv_int4_32_low_rank": Function(("gemv/gemv_int4_32_low_rank.hip",), CODES),
    "gemv_int4_64_low_rank": Function(("gemv/gemv_int4_64_low_rank.hip",), GROUPS_OF_64),
    "experts_int4": Function(("experts/experts_int4.hip",), EXPERT_OFFSETS),
    "experts_int4_32": Function(("experts/experts_int4_32.hip",), {**EXPERT_OFFSETS, "e2m1": CODES["e2m1"]}),
    "experts_int4_64": Function(("experts/experts_int4_64.hip",), EXPERT_OFFSETS),
    "int4_gemm": Function(("gemm/int4_gemm.hip",)),
    "gemv_fp8": Function(("gemv/gemv_fp8.hip",), {**FP8, FP8_BLOCKS: 2}),
    "gemv_w8a8": Function(("gemv/gemv_w8a8.hip",)),
    "gemv_w8a8_fp8": Function(("gemv/gemv_w8a8_fp8.hip",), FP8),
    "gemv_compact": Function(("gemv/gemv_compact.hip",), dtypes=()),
    "push_all_reduce": Function(("collective/push_all_reduce.hip",), dtypes=()),
    "read_limit": Function(("read_limit.hip",), dtypes=()),
}
BESIDE = {"unpack_compact": "gemv_compact"}  # function -> the one in whose library it is


def library_of(function: str, dtype: str, variant: str = "") -> str:
    """The library of a function for activations of a dtype, in one of its variants."""
    function = BESIDE.get(function, function)
    made = FUNCTIONS[function]
    assert variant in made.variants if made.variants else not variant, (function, variant)
    return "_".join(filter(None, (function, dtype if made.dtypes else "", variant)))


def _every() -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    for function, made in FUNCTIONS.items():
        for dtype in made.dtypes or ("",):
            of_dtype = (f"-DONLY_DTYPE={DTYPES.index(dtype)}",) if dtype else ()
            for variant in made.variants or ("",):
                flags = (*of_dtype, *((f"-DONLY_FORM={made.variants[variant]}",) if variant else ()))
                yield library_of(function, dtype, variant), dict.fromkeys(made.sources, flags)


#: library -> its sources, each with the flags that leave it the library's own kernels
GPU_LIBRARIES: Mapping[str, Mapping[str, tuple[str, ...]]] = dict(_every())
