// Kinds of launches that have specialised kernels, and the arguments that are constants in each.
#pragma once
#include "attention.h"

// Most launches have a head size that fills the kernel's columns and no window, softcap, norm or sinks; and one new
// token a row with one tile of queries, or several new tokens of a single row (prompt lookup). Kernels for these alone,
// with one query head for each cached head (ONE) or SEVERAL, are a fifth to a third smaller, which leaves room in the
// instruction cache for the linear layers. LONE kinds have a single row, and may read words of q and k that are not
// stored yet. DYNAMIC kinds are for rows of many KV splits.
enum Kind { ANY, ONE, SEVERAL, LONE_ONE, LONE_SEVERAL, LONE_TOKENS, DYNAMIC_ONE, DYNAMIC_SEVERAL };
template <Kind KIND> constexpr bool DYNAMIC = KIND == DYNAMIC_ONE || KIND == DYNAMIC_SEVERAL;
template <Kind KIND> constexpr bool ONE_TILE = KIND != ANY && KIND != LONE_TOKENS;  // of queries
// Whether q and k may be read before the kernel before has stored all of them.
template <Kind KIND> constexpr bool LATE_WORDS = KIND != ONE && KIND != SEVERAL && !DYNAMIC<KIND>;
template <Kind KIND>
constexpr bool SOLE_QUERY = KIND == ONE || KIND == LONE_ONE || KIND == DYNAMIC_ONE;  // of a cached head
constexpr Kind lone(Kind kind) { return kind == ONE ? LONE_ONE : LONE_SEVERAL; }
constexpr Kind dynamic(Kind kind) { return kind == ONE ? DYNAMIC_ONE : DYNAMIC_SEVERAL; }
template <int WIDE> Kind kind_of(const AttentionArgs& a) {
    if (a.size != WIDE || a.window || a.softcap > 0.f || a.q_norm || a.k_norm || a.sinks) return ANY;
    if (a.tokens > 1) return a.rows == 1 ? LONE_TOKENS : ANY;
    return a.heads > a.kv_heads * QUERIES ? ANY : a.heads == a.kv_heads ? ONE : SEVERAL;
}
template <Kind KIND, int WIDE> DEVICE AttentionArgs known(AttentionArgs a) {
    if (KIND != ANY) a.size = WIDE, a.window = 0, a.softcap = 0.f, a.q_norm = a.k_norm = nullptr, a.sinks = nullptr;
    if (KIND == LONE_TOKENS) a.consumer = nullptr;  // signalled, but not waited for
    else if (KIND != ANY) a.tokens = 1;
    if (SOLE_QUERY<KIND>) a.kv_heads = a.heads;
    if (KIND == LONE_ONE || KIND == LONE_SEVERAL || KIND == LONE_TOKENS) a.rows = 1;
    return a;
}
template <Kind KIND> DEVICE AttentionPlan known(AttentionPlan plan) {
    if (KIND != ANY && KIND != LONE_TOKENS) plan.tiles = 1;
    if (SOLE_QUERY<KIND>) plan.group = plan.queries = 1;
    return plan;
}
