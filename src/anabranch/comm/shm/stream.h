// The copy into memory that another core has read last.
//
// Ordinary stores would first fetch every line back from the reader's cache; streaming stores do not.
// Measured on 2 cores: 64 KB to a peer and back takes 7 us instead of 18.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace anabranch::shm {

#if defined(__x86_64__)

// Whole lines: to the slot `dst`, which is aligned, and unless null to `also`.
inline void stream_sse(char* dst, char* also, const char* src, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    auto* to = reinterpret_cast<__m128i*>(dst + i);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
    if (!also) continue;
    auto* own = reinterpret_cast<__m128i*>(also + i);
    _mm_storeu_si128(own, a), _mm_storeu_si128(own + 1, b);
    _mm_storeu_si128(own + 2, c), _mm_storeu_si128(own + 3, d);
  }
}

__attribute__((target("avx2"))) inline void stream_avx2(char* dst, char* also, const char* src, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    const auto* from = reinterpret_cast<const __m256i*>(src + i);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    auto* to = reinterpret_cast<__m256i*>(dst + i);
    _mm256_stream_si256(to, a), _mm256_stream_si256(to + 1, b);
    if (!also) continue;
    auto* own = reinterpret_cast<__m256i*>(also + i);
    _mm256_storeu_si256(own, a), _mm256_storeu_si256(own + 1, b);
  }
}

inline void stream_lines(char* dst, char* also, const char* src, int64_t bytes) {
  static const auto best = __builtin_cpu_supports("avx2") ? stream_avx2 : stream_sse;
  best(dst, also, src, bytes);
}

#endif

// Copies to the slot `dst` and, unless null, to the sender's own memory `also`. Visible to whoever sees a
// flag that is set after `published()`.
inline void publish(char* dst, char* also, const char* src, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t head = -reinterpret_cast<intptr_t>(dst) & 63, lines = (bytes - head) & ~int64_t{63};
  if (lines > 0) {
    memcpy(dst, src, head);
    if (also) memcpy(also, src, head);
    stream_lines(dst + head, also ? also + head : nullptr, src + head, lines);
    const int64_t done = head + lines;
    dst += done, src += done, bytes -= done;
    if (also) also += done;
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
