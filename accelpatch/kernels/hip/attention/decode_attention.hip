// decode_attention: fp16 and bf16, over a cache of the same. dtype: 0 bf16, 1 fp16.
#include "attention_entry.h"

extern "C" int accelpatch_decode_attention(const AttentionArgs* args, int dtype, void* stream) {
    return decode_attention(*args, false, stream, [dtype](const auto& launch) { return by_dtype(dtype, launch); });
}
