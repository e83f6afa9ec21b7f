// gemv_int8_low_rank: gemv_int8 with LoRA inside, see low_rank.h.
#define LOW_RANK
#define accelpatch_gemv_int8 accelpatch_gemv_int8_low_rank
#include "low_rank.h"

#include "gemv_int8.hip"
