// The rows of decoding whose keys were shared by several CTAs: their parts are merged, exactly.
//
//   m = max_c m_c,   l = sum_c exp(m_c - m) l_c,   out = sum_c exp(m_c - m) acc_c / l,   lse = m + log l
//
// Shapes    as forward.cu, whose shares are worked out again from the lengths.
// Work      a warp a row (sequence, head, token), WARPS of them a CTA. Rows that one CTA had whole are left alone.
// Budget    registers for a row over the lanes; no shared memory.
// Edges     a part without keys has l = 0 and the lowest m.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(SINKS) || !defined(FORWARD_WARPS) || !defined(QUERY_ROWS)
#error "DTYPE, HEAD_DIM, SINKS, FORWARD_WARPS and QUERY_ROWS come from a launch-configuration table"
#endif
#include "row_end.cuh"
#include "shares.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_decode_combine(const void* __restrict__ seqlens_k_g, const void* __restrict__ sinks_g,
                             const float* __restrict__ partial_out_g, const float* __restrict__ partial_sums_g,
                             DTYPE* __restrict__ out_g, float* __restrict__ lse_g, const DecodeParams params) {
  constexpr int kWarps = THREADS / kWarpSize;
  const AttentionParams& attention = params.attention;
  const int64 at = static_cast<int64>(blockIdx.x) * kWarps + warp_index();
  const int head = static_cast<int>(at % attention.heads);
  const int64 tokens = at / attention.heads;
  const int token = static_cast<int>(tokens % attention.sq), batch = static_cast<int>(tokens / attention.sq);
  if (batch >= params.batch) return;

  const int head_row = token * attention.group + head % attention.group;
  const int index = head / attention.group * params.row_tiles + head_row / QUERY_ROWS;
  const Shares shares = shares_of<FORWARD_WARPS>(params, seqlens_k_g);
  const Segment segment = segment_of<FORWARD_WARPS>(params, seqlens_k_g, batch, index);
  const int first_cta = shares.cta_of(segment.first), last_cta = shares.cta_of(segment.first + segment.units - 1);
  if (first_cta == last_cta) return;

  const auto row_of = [&](int cta) {
    return static_cast<int64>(Segment::slot(cta, first_cta)) * QUERY_ROWS + head_row % QUERY_ROWS;
  };
  const auto* sums_g = reinterpret_cast<const float2*>(partial_sums_g);
  RowSum<HEAD_DIM> sum;
  for (int cta = first_cta + lane_index(); cta <= last_cta; cta += kWarpSize) {
    sum.m = fmaxf(sum.m, sums_g[row_of(cta)].x);
  }
  sum.m = warp_reduce<Max>(sum.m);
#pragma unroll 8
  for (int cta = first_cta; cta <= last_cta; cta++) {
    const int64 row = row_of(cta);
    const float2 part = sums_g[row];
    const float weight = ex2_approx(part.x - sum.m);
    sum.l = __fmaf_rn(weight, part.y, sum.l);
    sum.add(partial_out_g + row * HEAD_DIM, weight);
  }
  sum.write<SINKS>(attention, batch, head, token, sinks_g, out_g, lse_g);
}
