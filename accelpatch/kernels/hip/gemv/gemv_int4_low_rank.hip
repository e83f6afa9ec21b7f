// gemv_int4_low_rank: gemv_int4 with LoRA inside, see low_rank.h.
#define LOW_RANK
#define accelpatch_gemv_int4 accelpatch_gemv_int4_low_rank
#include "low_rank.h"

#include "gemv_int4.hip"
