// Compiled once per instruction set: the kernels and the table of them.
#include "kernels.h"

#include "attention.h"
#include "partials.h"
#include "products.h"
#include "rows.h"

#define ANABRANCH_EXPAND(isa)   \
  namespace anabranch {         \
  namespace isa {               \
  extern const Kernels kernels; \
  }                             \
  }
ANABRANCH_EXPAND(ANABRANCH_ISA)

const anabranch::Kernels anabranch::ANABRANCH_ISA::kernels = {
    copy_rows, sum_members, pack_partials, merge_partials, attend_paged, attend_rows,
    rms_norm,  gated,       linear,        run_experts,
};
