// The rows of decoding whose keys were shared by several CTAs: their parts are merged, exactly.
//
//   m = max_c m_c,   l = sum_c exp(m_c - m) l_c,   out = sum_c exp(m_c - m) acc_c / l,   lse = m + log l
//
// Shapes    as forward.cu, whose shares are worked out again from the lengths.
// Work      a CTA a row (sequence, head, token); its warps take the parts in turn, then one warp merges the warps. Rows
//           that one CTA of the forward had whole are left alone.
// Budget    registers for a row over the lanes; shared memory for a row of each warp.
// Edges     a part without keys has l = 0 and the lowest m, and so has a warp without parts.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(SINKS) || !defined(FORWARD_WARPS) || !defined(QUERY_ROWS) || \
    !defined(THREADS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, SINKS, FORWARD_WARPS, QUERY_ROWS, THREADS, SHARED_BYTES come from a launch-configuration table"
#endif
#include "row_end.cuh"
#include "shares.cuh"

constexpr int kWarps = THREADS / kWarpSize;

struct Smem {
  float rows[kWarps][HEAD_DIM];
  float2 sums[kWarps];  // m and l
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_decode_combine(const void* __restrict__ seqlens_k_g, const void* __restrict__ q_offset_g,
                             const void* __restrict__ sinks_g, const float* __restrict__ partial_out_g,
                             const float* __restrict__ partial_sums_g, DTYPE* __restrict__ out_g,
                             float* __restrict__ lse_g, const DecodeParams params) {
  __shared__ Smem smem;
  const AttentionParams& attention = params.attention;
  const int head = static_cast<int>(blockIdx.x % attention.heads);
  const int tokens = static_cast<int>(blockIdx.x / attention.heads);
  const int token = tokens % attention.sq, batch = tokens / attention.sq;

  const int head_row = token * attention.group + head % attention.group;
  const int index = head / attention.group * params.row_tiles + head_row / QUERY_ROWS;
  const Lengths lengths{seqlens_k_g, q_offset_g};
  const Shares shares = shares_of<FORWARD_WARPS>(params, lengths);
  const Segment segment = segment_of<FORWARD_WARPS>(params, lengths, batch, index);
  const int first_cta = shares.cta_of(segment.first), last_cta = shares.cta_of(segment.first + segment.units - 1);
  if (first_cta == last_cta) return;

  const auto row_of = [&](int cta) {
    return static_cast<int64>(Segment::slot(cta, first_cta)) * QUERY_ROWS + head_row % QUERY_ROWS;
  };
  const auto* sums_g = reinterpret_cast<const float2*>(partial_sums_g);
  const int warp = warp_index();
  RowSum<HEAD_DIM> part;
  for (int cta = first_cta + warp + kWarps * lane_index(); cta <= last_cta; cta += kWarps * kWarpSize) {
    part.m = fmaxf(part.m, sums_g[row_of(cta)].x);
  }
  part.m = warp_reduce<Max>(part.m);
#pragma unroll 8
  for (int cta = first_cta + warp; cta <= last_cta; cta += kWarps) {
    const int64 row = row_of(cta);
    part.add(partial_out_g + row * HEAD_DIM, sums_g[row]);
  }
  part.store(smem.rows[warp]);
  if (lane_index() == 0) smem.sums[warp] = make_float2(part.m, part.l);
  __syncthreads();  // smem: written by every warp
  if (warp != 0) return;

  RowSum<HEAD_DIM> sum;
#pragma unroll
  for (int w = 0; w < kWarps; w++) sum.m = fmaxf(sum.m, smem.sums[w].x);
#pragma unroll
  for (int w = 0; w < kWarps; w++) sum.add(smem.rows[w], smem.sums[w]);
  sum.write<SINKS>(attention, batch, head, token, sinks_g, out_g, lse_g);
}
