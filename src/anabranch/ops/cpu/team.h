// Runs a loop of tasks over the calling thread's team.
//
// Owns the way to threads: torch's own OpenMP team, found at run time, because a second pool would
// fight the spinning first one for the cores. Knows nothing of what the tasks do.
#pragma once

#include <cstdint>

namespace anabranch {

// A task: its context, which of the loop's threads runs it (0 .. threads - 1) and its index.
using Task = void (*)(void* context, int worker, int64_t index);

// Calls task for each index in [0, count), over up to `threads` threads. With one thread, one task
// or no team to be found it runs in the caller, with no handoff.
void run_tasks(int threads, int64_t count, Task task, void* context);

// "openmp" when a team was found, else "none".
const char* team_name();

// How many pieces a job over `bytes` of memory is worth cutting into.
int pieces(int threads, int64_t bytes);

}  // namespace anabranch
