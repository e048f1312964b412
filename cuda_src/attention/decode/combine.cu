// The rows of decoding whose keys were shared by several CTAs: their parts are merged (../row_sum.cuh).
//
// Shapes    as forward.cu, whose shares are worked out again from the lengths.
// Work      a CTA a row (sequence, head, token), which ends at once where one CTA of the forward had it whole. Its
//           warps take the parts in turn, then one warp merges the warps. Of many rows a CTA has one warp, so that all
//           of them are there at once: to wait for memory is what takes time.
// Budget    registers for some parts of a row over the lanes; shared memory for a row of each warp.
// Edges     a part without keys has l = 0 and the lowest m, and so has a warp without parts.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(SINKS) || !defined(WARPS) || !defined(FORWARD_WARPS) || \
    !defined(QUERY_ROWS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, SINKS, WARPS, FORWARD_WARPS, QUERY_ROWS, SHARED_BYTES come from a launch-configuration table"
#endif
#include "../row_sum.cuh"
#include "splits.cuh"

using Row = RowSum<HEAD_DIM>;
constexpr int kWarps = WARPS;

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
  Segment segment{batch, index};
  const Splits splits = splits_around<FORWARD_WARPS>(params, Lengths{seqlens_k_g, q_offset_g}, segment);
  const int first_cta = splits.cta_of(segment.first), last_cta = splits.cta_of(segment.first + segment.units - 1);
  if (first_cta == last_cta) return;

  const auto* sums_g = reinterpret_cast<const float2*>(partial_sums_g);
  const int warp = warp_index();
  const auto row_of = [&](int cta) {
    return static_cast<int64>(Segment::slot(cta, first_cta)) * QUERY_ROWS + head_row % QUERY_ROWS;
  };
  Row part;
  part.add_parts(first_cta + warp, last_cta, kWarps, row_of, partial_out_g, sums_g);
  if constexpr (kWarps > 1) {
    part.store(smem.rows[warp]);
    if (lane_index() == 0) smem.sums[warp] = make_float2(part.m, part.l);
    __syncthreads();  // smem: written by every warp
    if (warp != 0) return;
    Row parts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; w++) parts[w].load(smem.rows[w], smem.sums[w]);
    part = Row();
    part.add(parts);
  }
  part.write<SINKS>(attention, batch, head, token, sinks_g, out_g, lse_g);
}
