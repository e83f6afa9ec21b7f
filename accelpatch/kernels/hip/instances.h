// Which instances of the kernels a library has: all that its source can make, or those that the build's flags name.
// Each is a library of its own, so that a first patch compiles what its model launches and no more.
#pragma once
#include <type_traits>

#include "arch/host.h"

#ifndef ONLY_DTYPE
#define ONLY_DTYPE -1  // 0 bf16, 1 fp16 activations
#endif
#ifndef ONLY_FORM
#define ONLY_FORM -1  // int8: group size; int4: kind of offset; fp8: whether fnuz; attention: columns of a head
#endif

template <int FORM> constexpr bool HAS = ONLY_FORM == -1 || ONLY_FORM == FORM;

// launch(std::false_type{}), or of 8-bit floats of the fnuz form std::true_type{}.
template <class LAUNCH> int by_form(int fnuz, const LAUNCH& launch) {
    if constexpr (HAS<0>) {
        if (fnuz == 0) return launch(std::false_type{});
    }
    if constexpr (HAS<1>) {
        if (fnuz == 1) return launch(std::true_type{});
    }
    return STATUS_FORMAT;
}

// launch(Bf16{}) or launch(F16{}); STATUS_FORMAT for what this library has not.
template <class LAUNCH> int by_dtype(int dtype, const LAUNCH& launch) {
    if constexpr (ONLY_DTYPE != 1) {
        if (dtype == 0) return launch(Bf16{});
    }
    if constexpr (ONLY_DTYPE != 0) {
        if (dtype == 1) return launch(F16{});
    }
    return STATUS_FORMAT;
}
