// Which instruction sets the kernels were compiled for, and which of them this machine can run.
#pragma once

#include "kernels.h"

namespace anabranch {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool runnable;  // by the processor, and enabled by the operating system
};

// Every compiled set, the widest first.
const Isa* isas(int* count);

// Whether the processor multiplies tiles of bfloat16 (AMX) and the operating system keeps their state.
bool has_tiles();

}  // namespace anabranch
