// gemv_low_rank: gemv with LoRA inside, see low_rank.h.
#define LOW_RANK
#define accelpatch_gemv accelpatch_gemv_low_rank
#include "low_rank.h"

#include "gemv.hip"
