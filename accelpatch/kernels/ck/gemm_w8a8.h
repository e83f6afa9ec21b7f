// CK's DeviceBatchedGemmMultiD_Xdl with the element operation of epilogue.h: one instance a library.
//
// Layouts: A row-major [M, K], B column-major, which is a weight [N, K] as it lies, D and E row-major. A row's scale is
// a column-major D with a stride of 0; CK loads all Ds and stores E by vectors of one length, so that length is 1
// there.
#pragma once
#include <array>
#include <stdexcept>

#include "ck/ck.hpp"
#include "ck/tensor_operation/gpu/device/gemm_specialization.hpp"
#include "ck/tensor_operation/gpu/device/impl/device_batched_gemm_multi_d_xdl.hpp"
#include "ck/tensor_operation/gpu/device/tensor_layout.hpp"
#include "ck/tensor_operation/gpu/element/element_wise_operation.hpp"

#include "epilogue.h"
#include "instances.h"

namespace w8a8 {

using Row = ck::tensor_layout::gemm::RowMajor;
using Column = ck::tensor_layout::gemm::ColumnMajor;

// numbered as FORMS of build/ck_libraries.py
template <int NUMBER, class D> struct FormOf;
template <class D> struct FormOf<0, D> {
    using Types = ck::Tuple<>;
    using Layouts = ck::Tuple<>;
};
template <class D> struct FormOf<1, D> {
    using Types = ck::Tuple<D>;
    using Layouts = ck::Tuple<Row>;
};
template <class D> struct FormOf<2, D> {
    using Types = ck::Tuple<float, float>;
    using Layouts = ck::Tuple<Column, Row>;
};
template <class D> struct FormOf<3, D> {
    using Types = ck::Tuple<float, float, D>;
    using Layouts = ck::Tuple<Column, Row, Row>;
};

template <int FORM, int OUTPUT, int TILE> struct Gemm {
    using I = InstanceOf<FORM, OUTPUT, TILE>;
    using T = typename I::Tile;
    using E = typename I::E;
    using F = FormOf<FORM, E>;
    static constexpr int SHUFFLED = T::columns / T::column_mfmas;  // columns that go through LDS at a time
    static constexpr int ALONG_N = SHUFFLED / I::n_vector;         // threads along a row of them
    static_assert(sizeof(ck::bhalf_t) == 2 && std::is_same_v<ck::bhalf_t, uint16_t>, "bf16 is a uint16_t");
    static_assert(std::is_same_v<ck::half_t, _Float16>, "fp16 is a _Float16");

    template <ck::index_t... Is> using S = ck::Sequence<Is...>;
    using Same = ck::tensor_operation::element_wise::PassThrough;
    using Loads = S<4, 64, 1>;
    using Order = S<1, 0, 2>;
    static constexpr int K1 = 16, MFMA = 32;
    static constexpr auto PADDED = ck::tensor_operation::device::GemmSpecialization::MNKPadding;
    using Device =
        ck::tensor_operation::device::DeviceBatchedGemmMultiD_Xdl<Row, Column, typename F::Layouts, Row, int8_t, int8_t,
            int32_t, int32_t, typename F::Types, E, Same, Same, Epilogue, PADDED, 1, I::threads, T::rows, T::columns,
            I::k_tile, K1, K1, MFMA, MFMA, T::row_mfmas, T::column_mfmas, Loads, Order, Order, 2, T::k_vector, K1, true,
            Loads, Order, Order, 2, T::k_vector, K1, true, 1, 1, S<1, I::threads / ALONG_N, 1, ALONG_N>, I::n_vector>;
    static constexpr int DS = F::Types::Size();
    using Strides = std::array<ck::index_t, DS>;
    using Pointers = std::array<const void*, DS>;

    static void ds(const GemmArgs& g, Pointers& pointers, Strides& strides, Strides& batch_strides) {
        int at = 0;
        if constexpr (I::scaled) {
            for (const void* scale : {g.row_scale, g.column_scale})
                pointers[at] = scale, strides[at] = 0, batch_strides[at++] = 0;
        }
        if constexpr (I::has_d) {
            pointers[at] = g.d;
            strides[at] = ck::index_t(g.d_stride);
            batch_strides[at] = ck::index_t(g.d_batch_stride);
        }
    }

    static int launch(const GemmArgs& g, hipStream_t stream) {
        if (const int bad = check(g, I::limits)) return bad;
        Pointers pointers{};
        Strides strides{}, batch_strides{};
        ds(g, pointers, strides, batch_strides);
        const auto i = [](int64_t value) { return static_cast<ck::index_t>(value); };
        const auto argument = Device::MakeArgument(g.a, g.b, pointers, g.e, i(g.m), i(g.n), i(g.k), i(g.batch),
            i(g.a_stride), i(g.b_stride), strides, i(g.e_stride), i(g.a_batch_stride), i(g.b_batch_stride),
            batch_strides, i(g.e_batch_stride), Same{}, Same{}, Epilogue{g.alpha, g.beta, g.relu != 0});
        static const bool supported = Device::IsSupportedArgument(argument);  // of the arch: sizes are checked above
        if (!supported) return STATUS_ARCH;
        try {
            Device::MakeInvoker().Run(argument, StreamConfig{stream, false});
        } catch (const std::runtime_error&) {
            return STATUS_DEVICE + int(hipGetLastError());
        }
        return STATUS_OK;
    }
};

}  // namespace w8a8
