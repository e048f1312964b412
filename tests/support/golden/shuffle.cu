// Golden vectors of shfl.sync: a warp per CTA, which has its own lane and clamp operands.
#include "common/config.cuh"

#define SHUFFLE(kind)                                                                                 \
  {                                                                                                   \
    uint32 result, inside;                                                                            \
    asm volatile("{.reg .pred p; shfl.sync." kind ".b32 %0|p, %2, %3, %4, %5; selp.u32 %1, 1, 0, p;}" \
                 : "=r"(result), "=r"(inside)                                                         \
                 : "r"(value), "r"(lane), "r"(clamp), "r"(members));                                  \
    results_g[at] = result;                                                                           \
    insides_g[at] = inside;                                                                           \
    results_g += gridDim.x * kWarpSize;                                                               \
    insides_g += gridDim.x * kWarpSize;                                                               \
  }

// The last result is of the odd lanes alone, which shuffle among themselves on one side of a branch.
extern "C" __global__ void golden_shuffle(const uint32* values_g, const uint32* lanes_g, const uint32* clamps_g,
                                          uint32* results_g, uint32* insides_g) {
  const int at = blockIdx.x * kWarpSize + lane_index();
  const uint32 value = values_g[at], lane = lanes_g[at], clamp = clamps_g[at];
  const uint32 members = kFullWarp;
  SHUFFLE("up")
  SHUFFLE("down")
  SHUFFLE("bfly")
  SHUFFLE("idx")
  if (lane_index() % 2) {
    const uint32 lane = lanes_g[at] | 1, clamp = 31, members = 0xaaaaaaaau;
    SHUFFLE("idx")
  }
}
