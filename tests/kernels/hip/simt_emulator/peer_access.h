// In place of the kernels' arch/peer_access.h: ranks are blocks of one launch, and what one of them stores in another's
// memory is there after some time, word by word.
#pragma once
#include "portability.h"

DEVICE void store_system16(void* into, const Words4& v) {
    aligned(into, 16);
    for (int i = 0; i < 4; ++i) delay(most_delay), static_cast<uint32_t*>(into)[i] = word_of(v, i);
}
DEVICE Words4 load_system16(const void* source) { return aligned(source, 16), *static_cast<const Words4*>(source); }
DEVICE void backoff(int looks) {
    if (looks == 1 << 16) std::abort();
    ++meeting.messages, emulator.yield();
}
