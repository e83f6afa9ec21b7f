"""The formats of the HIP gemv kernels that are tested and timed, by name."""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.kernels.compiling.gpu_libraries import FP8, FP8_BLOCKS

FP8_FORMS = (*FP8, FP8_BLOCKS)


@dataclass(frozen=True)
class Format:
    """One way to hold a weight: the function that reads it, its format argument, group size, offsets."""

    library: str
    argument: int | None = None
    group: int | None = None
    offset: str = "none"
    step: int = 32  # values of K a step

    @property
    def variant(self) -> str:
        """The one of the function's libraries."""
        if self.library == "gemv_int8":
            return {0: "rows", 32: "g32"}.get(self.argument or 0, "g64")
        if self.library in ("gemv_fp8", "gemv_w8a8_fp8"):
            return FP8_FORMS[self.argument or 0]
        if self.library == "gemv_int3":
            return f"g{min(self.group or 128, 128)}_{self.offset}"
        return self.offset if self.library.startswith("gemv_int4") else ""

    @property
    def most(self) -> int:
        """The largest code of an integer format in tiles."""
        return 7 if self.library == "gemv_int3" else 15


FORMATS = {
    "plain": Format("gemv"),
    "int8": Format("gemv_int8", 0, step=64),
    "int8_g32": Format("gemv_int8", 32, 32, step=64),
    "int8_g64": Format("gemv_int8", 64, 64, step=64),
    "int8_g128": Format("gemv_int8", 128, 128, step=64),
    "int4_g128": Format("gemv_int4", 128, 128, step=128),
    "int4_g64": Format("gemv_int4_64", 64, 64, step=128),
    "int4_g32": Format("gemv_int4_32", 32, 32, step=128),
    "int4_g128_zero": Format("gemv_int4", 128, 128, "zero_point", step=128),
    "int4_g128_minimum": Format("gemv_int4", 128, 128, "minimum", step=128),
    "int4_g64_minimum": Format("gemv_int4_64", 64, 64, "minimum", step=128),
    "int4_g32_minimum": Format("gemv_int4_32", 32, 32, "minimum", step=128),
    "nf4_g64": Format("gemv_int4_64", 64, 64, "nf4", step=128),
    "nf4_g32": Format("gemv_int4_32", 32, 32, "nf4", step=128),
    "fp4_g64": Format("gemv_int4_64", 64, 64, "fp4", step=128),
    "e2m1_g32": Format("gemv_int4_32", 32, 32, "e2m1", step=128),
    "nvfp4_g16": Format("gemv_int4_32", 32, 16, "nvfp4", step=128),
    "int4_row": Format("gemv_int4", 1 << 20, 0, step=128),
    "int4_row_zero": Format("gemv_int4", 1 << 20, 0, "zero_point", step=128),
    "int3_g128": Format("gemv_int3", 128, 128, step=128),
    "int3_g128_minimum": Format("gemv_int3", 128, 128, "minimum", step=128),
    "int3_g64_zero": Format("gemv_int3", 64, 64, "zero_point", step=128),
    "int3_g32_minimum": Format("gemv_int3", 32, 32, "minimum", step=128),
    "int3_row": Format("gemv_int3", 1 << 20, 0, step=128),
    "fp8": Format("gemv_fp8", 0, step=64),
    "fp8_blocks": Format("gemv_fp8", 2, step=64),
    "compact": Format("gemv_compact", step=64),
}
# They quantise their input too, so that the float rule is not for them: see w8a8_checks.py and w8a8_fp8_checks.py.
W8A8, W8A8_FP8 = "w8a8", "w8a8_fp8"
TIMED = {**FORMATS, W8A8: Format("gemv_w8a8", step=64), W8A8_FP8: Format("gemv_w8a8_fp8", 0, step=64)}
