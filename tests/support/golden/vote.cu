// Golden vectors of vote, match and activemask: a warp per CTA, of which the lanes in `members` take part.
#include "common/config.cuh"

#define STORE(result)                   \
  {                                     \
    results_g[at] = result;             \
    results_g += gridDim.x * kWarpSize; \
  }
#define VOTE(kind)                                                                                                  \
  {                                                                                                                 \
    uint32 result;                                                                                                  \
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync." kind ".pred q, p, %2; selp.u32 %0, 1, 0, q;}" \
                 : "=r"(result)                                                                                     \
                 : "r"(vote), "r"(members));                                                                        \
    STORE(result)                                                                                                   \
  }
#define MATCH_ANY(type, constraint, value)                                                                \
  {                                                                                                       \
    uint32 result;                                                                                        \
    asm volatile("match.any.sync." type " %0, %1, %2;" : "=r"(result) : constraint(value), "r"(members)); \
    STORE(result)                                                                                         \
  }
#define MATCH_ALL(type, constraint, value)                                                     \
  {                                                                                            \
    uint32 result, agree;                                                                      \
    asm volatile("{.reg .pred p; match.all.sync." type " %0|p, %2, %3; selp.u32 %1, 1, 0, p;}" \
                 : "=r"(result), "=r"(agree)                                                   \
                 : constraint(value), "r"(members));                                           \
    STORE(result)                                                                              \
    STORE(agree)                                                                               \
  }

extern "C" __global__ void golden_vote(const uint32* votes_g, const uint32* members_g, const uint64* values_g,
                                       uint32* results_g) {
  const int at = blockIdx.x * kWarpSize + lane_index();
  const uint32 vote = votes_g[at], members = members_g[blockIdx.x];
  const uint64 value = values_g[at];
  const uint32 low = static_cast<uint32>(value);
  if ((members >> lane_index() & 1) == 0) return;
  uint32 ballot, active;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2;}"
               : "=r"(ballot)
               : "r"(vote), "r"(members));
  STORE(ballot)
  VOTE("any")
  VOTE("all")
  VOTE("uni")
  MATCH_ANY("b32", "r", low)
  MATCH_ANY("b64", "l", value)
  MATCH_ALL("b32", "r", low)
  MATCH_ALL("b64", "l", value)
  asm volatile("activemask.b32 %0;" : "=r"(active));
  STORE(active)
}
