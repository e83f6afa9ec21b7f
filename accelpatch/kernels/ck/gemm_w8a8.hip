// The five fused int8 products of SmoothQuant, and those with a scale for each row and column, by Composable Kernel.
//
//     form 0   bmm_abe_i8, bmm_ab_i8_e_f32                                  E = alpha A B
//     form 1   linear_abde_i8, linear_relu_abde_i8, linear_ab_i8_de_f32     E = alpha A B + beta D
//     form 2   W8A8 without bias                        E = alpha row_scale column_scale A B
//     form 3   W8A8 with bias                           E = alpha row_scale column_scale A B + beta D
//
// Each takes a batch and ReLU. ONLY_FORM, ONLY_OUTPUT and ONLY_TILE say which instance this is.
#include "gemm_w8a8.h"

extern "C" __attribute__((visibility("default"))) int accelpatch_ck_gemm_w8a8(const w8a8::GemmArgs* g, void* stream) {
    return w8a8::Gemm<ONLY_FORM, ONLY_OUTPUT, ONLY_TILE>::launch(*g, static_cast<hipStream_t>(stream));
}
