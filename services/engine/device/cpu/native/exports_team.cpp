#include "team.h"

#pragma GCC visibility push(default)
extern "C" {

// Null if threads cannot be started.
catenary::Team* catenary_team_new(int32_t size, const int32_t* cpus, int32_t cpu_count) {
  try {
    return new catenary::Team(size, cpus, cpu_count);
  } catch (...) {
    return nullptr;
  }
}

void catenary_team_free(catenary::Team* team) { delete team; }

}  // extern "C"
#pragma GCC visibility pop
