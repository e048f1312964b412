// absmax of blocks into codes of eight bits, which expand_scales.cu reads: a group has 256 even steps between its
// smallest and its largest absmax.
//
//   offset = low / 2 + high / 2,   nested_absmax = max(high - offset, offset - low)
//   code = round(127.5 (absmax - offset) / nested_absmax + 127.5),   table[code] = (2 code - 255) / 255
//
// bitsandbytes has one offset for all groups, their mean, and a table that is finer near it. An offset for each group
// needs no pass over all groups first, and its error is at most 1 / 255 of the group's span.
//
// Shapes    absmax (count,) in float32; codes (count,), super_scales (ceil(count / GROUP), 2), table (256,).
// Work      a warp has a group, a lane GROUP / 32 of its blocks; grid ceil(groups / warps of a CTA).
// Budget    registers alone.
// Edges     float32 arithmetic in which each operation rounds once and subnormal numbers are 0. All codes of a group of
//           equal numbers mean its offset. A group with NaN or an infinity has NaN in both numbers.
#if !defined(THREADS) || !defined(GROUP)
#error "THREADS and GROUP come from a launch-configuration table"
#endif
#include "../../common/memory.cuh"
#include "../../common/reduce.cuh"

constexpr int kItems = GROUP / kWarpSize, kEntries = 256;
constexpr float kHalfSteps = 127.5f;
static_assert(THREADS == kEntries && kItems * kWarpSize == GROUP,
              "a thread of the first CTA has an entry of the table");

struct Min {
  __device__ __forceinline__ float operator()(float a, float b) const { return fminf(a, b); }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    nest_scales(const float* __restrict__ absmax_g, unsigned char* __restrict__ scales_g,
                float* __restrict__ super_scales_g, float* __restrict__ scale_table_g, const uint32 count) {
  if (blockIdx.x == 0) {
    scale_table_g[threadIdx.x] = __fdiv_rn(static_cast<float>(2 * static_cast<int>(threadIdx.x) - 255), 255.f);
  }
  const uint32 group = blockIdx.x * static_cast<uint32>(THREADS / kWarpSize) + threadIdx.x / kWarpSize;
  const uint32 first = group * GROUP;
  if (first >= count) return;

  // Phase 1: the group's numbers. Places beyond the last one repeat its first one.
  float absmax[kItems], low = kInfinity, high = -kInfinity, nan = 0.f;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const uint32 place = first + i * kWarpSize + lane_index();
    absmax[i] = absmax_g[place < count ? place : first] + 0.f;
    low = fminf(low, absmax[i]);
    high = fmaxf(high, absmax[i]);
    nan = __fmaf_rn(absmax[i], 0.f, nan);
  }
  nan = warp_reduce<Sum>(nan);
  low = warp_reduce<Min>(low) + nan;
  high = warp_reduce<Max>(high) + nan;
  const float offset = __fadd_rn(__fmul_rn(low, 0.5f), __fmul_rn(high, 0.5f));
  const float up = __fsub_rn(high, offset), down = __fsub_rn(offset, low);
  const float span = up > down ? up : down;
  if (lane_index() == 0) {
    st_global_v2(super_scales_g + 2 * static_cast<int64>(group),
                 make_uint2(__float_as_uint(span), __float_as_uint(offset)));
  }

  // Phase 2: the codes.
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const uint32 place = first + i * kWarpSize + lane_index();
    const float share = span > 0.f ? __fdiv_rn(__fsub_rn(absmax[i], offset), span) : 0.f;
    const float code = rintf(__fadd_rn(__fmul_rn(share, kHalfSteps), kHalfSteps));
    if (place < count) scales_g[place] = static_cast<unsigned char>(fminf(fmaxf(code, 0.f), 255.f));
  }
}
