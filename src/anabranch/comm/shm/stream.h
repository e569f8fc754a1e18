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

// Copies to the slot `dst` and, unless null, to the sender's own memory `also`. Visible to whoever sees a
// flag that is set after `published()`.
inline void publish(char* dst, char* also, const char* src, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t head = -reinterpret_cast<intptr_t>(dst) & 63;
  if (bytes >= head + 64) {
    memcpy(dst, src, head);
    if (also) memcpy(also, src, head), also += head;
    dst += head, src += head, bytes -= head;
    for (; bytes >= 64; dst += 64, src += 64, bytes -= 64) {
      const auto* from = reinterpret_cast<const __m128i*>(src);
      auto* to = reinterpret_cast<__m128i*>(dst);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
      if (!also) continue;
      auto* own = reinterpret_cast<__m128i*>(also);
      _mm_storeu_si128(own, a), _mm_storeu_si128(own + 1, b);
      _mm_storeu_si128(own + 2, c), _mm_storeu_si128(own + 3, d);
      also += 64;
    }
  }
#endif
  memcpy(dst, src, bytes);
  if (also) memcpy(also, src, bytes);
}

inline void published() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace anabranch::shm
