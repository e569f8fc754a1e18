// Which instruction sets the kernels were compiled for, and which of them this machine can run.
#pragma once

#include <string>

#include "kernels.h"

namespace anabranch {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool runnable;  // by the processor, and enabled by the operating system
};

// Every compiled set, the widest first.
const Isa* isas(int* count);

// The kernels of one of them. std::invalid_argument if it was not compiled or cannot run here.
const Kernels* kernels_of(const std::string& isa);

// Whether the processor multiplies tiles of bfloat16 (AMX) and the operating system keeps their state.
bool has_tiles();

}  // namespace anabranch
