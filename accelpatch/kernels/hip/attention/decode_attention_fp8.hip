// decode_attention_fp8: bf16, over a cache of e4m3 codes. dtype: 0.
#include "attention_entry.h"

extern "C" int accelpatch_decode_attention_fp8(const AttentionArgs* args, int dtype, void* stream) {
    return decode_attention(*args, true, stream,
        [dtype](const auto& launch) { return dtype ? STATUS_FORMAT : launch(Coded<Bf16, E4m3Codes>{}); });
}
