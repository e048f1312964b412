// absmax of blocks from codes of eight bits (Dettmers et al., arXiv:2305.14314, section 3, double quantisation), for
// products with their weight:
//
//   absmax[i] = table[code[i]] * nested_absmax[i / GROUP] + offset[i / GROUP]
//
// The product and the sum are rounded once each, as in bitsandbytes.
//
// Shapes    codes (count,) of all rows' blocks; super_scales (ceil(count / GROUP), 2) of (nested_absmax, offset); table
//           (256,); absmax (count,) in float32.
// Work      a thread has kItems neighbouring blocks, which are of one group; grid ceil(count / kItems / THREADS).
// Budget    a few registers; the table in 1 KiB of shared memory.
// Edges     subnormal numbers are 0, before the sum too. Codes beyond `count` are not read.
#if !defined(THREADS) || !defined(GROUP)
#error "THREADS and GROUP come from a launch-configuration table"
#endif
#include "../../common/memory.cuh"
#include "../../common/numeric.cuh"

constexpr int kItems = 4, kEntries = 256;
static_assert(THREADS == kEntries && GROUP % kItems == 0, "a thread brings one number of the table");

extern "C" __global__ void __launch_bounds__(THREADS)
    expand_scales(const unsigned char* __restrict__ scales_g, const float* __restrict__ super_scales_g,
                  const float* __restrict__ scale_table_g, float* __restrict__ absmax_g, const uint32 count) {
  __shared__ float table_s[kEntries];

  // Phase 1: the table.
  table_s[threadIdx.x] = scale_table_g[threadIdx.x];
  __syncthreads();  // table_s: filled

  // Phase 2: codes and their group's numbers; then absmax.
  const uint32 first = (blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x) * kItems;
  if (first >= count) return;
  const float2 group = reinterpret_cast<const float2*>(super_scales_g)[first / GROUP];
  const bool whole = first + kItems <= count;
  uint32 codes = 0;
  if (whole) {
    codes = *reinterpret_cast<const uint32*>(scales_g + first);
  } else {
    for (uint32 i = first; i < count; i++) codes |= static_cast<uint32>(scales_g[i]) << 8 * (i - first);
  }
  float absmax[kItems];
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    absmax[i] = __fadd_rn(__fmul_rn(table_s[codes >> 8 * i & 0xff], group.x), group.y);
  }
  if (whole) {
    st_global_v4(absmax_g + first, make_uint4(__float_as_uint(absmax[0]), __float_as_uint(absmax[1]),
                                              __float_as_uint(absmax[2]), __float_as_uint(absmax[3])));
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (first + i < count) absmax_g[first + i] = absmax[i];
    }
  }
}
