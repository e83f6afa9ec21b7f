"""Lines of logs that name GEMMs, each from where its form is documented; nobody ran ROCm for them here."""

from __future__ import annotations

#: AMD's guide to hipBLASLt's GEMM tuning: a log of HIPBLASLT_LOG_MASK=64
MASK_64 = (
    "- {function: matmul, M: 16032, N: %d, K: 16384, lda: 16384, ldb: 16384, ldc: 16032, ldd: 16032, stride_a: 0, "
    "stride_b: 0, stride_c: 0, stride_d: 0, alpha: 1.0, beta: 0.0, transA: T, transB: N, batch_count: 1, scaleA: 0, "
    "scaleB: 0, scaleAlpha_vector: false, gradient: false, use_e: false, bias_vector: false, bias_source: d, "
    "a_type: bf16_r, b_type: bf16_r, c_type: bf16_r, d_type: bf16_r, scale_type: f32_r, bias_type: f32_r, "
    "compute_type: c_f32_r, activation_type: none, flush: false, rotating: 512, cold_iters: 0, iters: 0, call_count: 1}"
)
GUIDE = "".join(f"{MASK_64 % n}\n" for n in (109, 113))
#: the same with what HIPBLASLT_LOG_MASK=128 adds; names of the fields: utilities/geko/geko/constants.py of hipBLASLt
MASK_128 = (MASK_64 % 109).replace(
    "call_count: 1}",
    "solution_index: 247670, solution_name: Cijk_Alik_Bljk_BBS, kernel_name: Cijk_Alik, call_count: 7}",
)
#: ROCm/rocm-libraries, projects/hipblaslt/docs/how-to/how-to-use-hipblaslt-offline-tuning.rst: HIPBLASLT_LOG_MASK=32
MASK_32 = (
    "hipblaslt-bench --api_method c -m 1024 -n 512 -k 1024 --lda 1024 --ldb 1024 --ldc 1024 --ldd 1024  --stride_a 0 "
    "--stride_b 0 --stride_c 0 --stride_d 0  --alpha 1.000000 --beta 1.000000 --transA N --transB N --batch_count 1  "
    "--a_type f16_r --b_type f16_r --c_type f16_r --d_type f16_r --scale_type f32_r --bias_type f32_r   "
    "--compute_type f32_r --algo_method index --solution_index 56073"
)
#: rocBLAS's programmer's guide, ROCBLAS_LAYER=2 and 4
ROCBLAS_BENCH = (
    "./rocblas-bench -f gemm_ex --transposeA N --transposeB N -m 12288 -n 1 -k 4096 --alpha 1 --a_type f16_r "
    "--lda 12288 --b_type f16_r --ldb 4096 --beta 0 --c_type f16_r --ldc 12288 --d_type f16_r --ldd 12288 "
    "--compute_type f32_r --algo 0 --solution_index 0 --flags 0"
)
ROCBLAS_PROFILE = (
    '- { rocblas_function: "rocblas_gemm_ex", atomics_mode: atomics_allowed, a_type: "bf16_r", b_type: "bf16_r", '
    'c_type: "bf16_r", d_type: "bf16_r", compute_type: "f32_r", transA: \'T\', transB: \'N\', M: 12288, N: 4547, '
    "K: 4608, alpha: 1.0, lda: 4608, beta: 0.0, ldb: 4608, ldc: 12288, ldd: 12288, batch_count: 1, algo: 0, "
    "solution_index: 0, flags: none, call_count: 136 }"
)
#: torch's aten/src/ATen/cuda/tunable: what it records, and a line that it tuned
TUNABLE = (
    "GemmTunableOp_BFloat16_TN,tn_4096_512_11008_ld_11008_11008_4096",
    "GemmStridedBatchedTunableOp_float_TN,tn_128_128_64_B_96_ld_64_64_128",
    "GemmAndBiasTunableOp_Half_TN,tn_768_1024_768_ld_768_768_768",
    "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_12288_2048_ld_2048_2048_64_rw_1_bias_None",
    "GemmTunableOp_float_NT,nt_25088_4096_64_ld_25088_4096_25088,Gemm_Hipblaslt_NT_52565,0.0653662",
)


def fp8(n: int, calls: int = 1) -> str:
    """A mask 64 line of 8-bit floats, bf16 out."""
    line = (MASK_64 % n).replace("a_type: bf16_r, b_type: bf16_r", "a_type: f8_fnuz_r, b_type: f8_fnuz_r")
    return line.replace("call_count: 1", f"call_count: {calls}")
