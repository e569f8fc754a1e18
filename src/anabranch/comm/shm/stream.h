// The copy into memory that another core has read last.
//
// Ordinary stores would first fetch every line back from the reader's cache; streaming stores do not.
// Measured on 2 cores: 64 KB to a peer and back takes 7 us instead of 18.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace anabranch::shm {

// Visible to whoever sees a flag that is set after `published()`.
inline void publish(char* dst, const char* src, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t head = -reinterpret_cast<intptr_t>(dst) & 63;
  if (bytes >= head + 64) {
    memcpy(dst, src, head);
    dst += head, src += head, bytes -= head;
    for (; bytes >= 64; dst += 64, src += 64, bytes -= 64)
      for (int i = 0; i < 64; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  }
#endif
  memcpy(dst, src, bytes);
}

inline void published() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace anabranch::shm
