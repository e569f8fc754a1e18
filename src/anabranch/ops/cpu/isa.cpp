#include "isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace anabranch {

#define ANABRANCH_DECLARE(isa)  \
  namespace isa {               \
  extern const Kernels kernels; \
  }
#ifdef ANABRANCH_HAS_generic
ANABRANCH_DECLARE(generic)
#endif
#ifdef ANABRANCH_HAS_avx2
ANABRANCH_DECLARE(avx2)
#endif
#ifdef ANABRANCH_HAS_avx512
ANABRANCH_DECLARE(avx512)
#endif

namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned a, b, c, d;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r{0, 0, 0, 0};
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) r = {0, 0, 0, 0};
  return r;
}

// The register states the operating system saves: without them the instructions fault.
unsigned long long enabled_states() {
  if (!(cpuid(1, 0).c >> 27 & 1)) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<unsigned long long>(high) << 32 | low;
}

bool all(unsigned word, unsigned long long bits) { return (word & bits) == bits; }

constexpr unsigned long long bit(int i) { return 1ull << i; }

bool runs_generic() { return all(cpuid(1, 0).c, bit(20) | bit(23)); }  // SSE4.2, POPCNT

bool runs_avx2() {
  return runs_generic() && (enabled_states() & 0x6) == 0x6 &&  // XMM, YMM
         all(cpuid(1, 0).c, bit(12) | bit(28) | bit(29)) &&    // FMA, AVX, F16C
         all(cpuid(7, 0).b, bit(3) | bit(5) | bit(8));         // BMI1, AVX2, BMI2
}

bool runs_avx512() {
  return runs_avx2() && (enabled_states() & 0xe6) == 0xe6 &&           // and mask, ZMM
         all(cpuid(7, 0).b, bit(16) | bit(17) | bit(30) | bit(31)) &&  // F, DQ, BW, VL
         all(cpuid(7, 0).c, bit(11)) && all(cpuid(7, 1).a, bit(5));    // VNNI, BF16
}

bool runs_tiles() {
  return (enabled_states() & 0x60000) == 0x60000 && all(cpuid(7, 0).d, bit(22) | bit(24));  // AMX-BF16, -TILE
}

#else

bool runs_generic() { return true; }
bool runs_tiles() { return false; }

#endif

}  // namespace

const Isa* isas(int* count) {
  static const Isa all[] = {
#ifdef ANABRANCH_HAS_avx512
      {"avx512", &avx512::kernels, runs_avx512()},
#endif
#ifdef ANABRANCH_HAS_avx2
      {"avx2", &avx2::kernels, runs_avx2()},
#endif
      {"generic", &generic::kernels, runs_generic()},
  };
  *count = sizeof all / sizeof *all;
  return all;
}

const Kernels* kernels_of(const std::string& isa) {
  int count;
  const Isa* all = isas(&count);
  for (int i = 0; i < count; ++i)
    if (isa == all[i].name && all[i].runnable) return all[i].kernels;
  throw std::invalid_argument("instruction set '" + isa + "' was not compiled or cannot run here");
}

bool has_tiles() { return runs_tiles(); }

}  // namespace anabranch
