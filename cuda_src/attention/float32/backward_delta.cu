// The first step of the float32 backward: what one query's scores share.
//
//   delta_i = sum_d dout_id out_id - dlse_i
//
// (Dao et al., arXiv:2205.14135, appendix B.2, equation 4; the gradient of lse_i, if there is one, joins each score's
// as p_ij dlse_i.)
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); delta
//           float32, (B, H, Sq), contiguous, or (H, rows) for one packed sequence after the other.
// Work      a warp owns a row; grid ceil(B * H * Sq / (THREADS / 32)).
// Edges     a row without keys has any delta: its weights are 0. dlse may be null. Rows that belong to no sequence are
//           neither read nor written. Of packed sequences ZEROED_DIM items of each row of dq become 0, to which one
//           pass adds: the host does not know which rows are used.
#if !defined(DTYPE) || !defined(HEAD_DIM_V) || !defined(ZEROED_DIM) || !defined(THREADS)
#error "DTYPE, HEAD_DIM_V, ZEROED_DIM and THREADS come from a launch-configuration table"
#endif
#include "../backward_sequences.cuh"
#include "row_sums.cuh"

#if PACKED
#define ZEROED_ARRAY , float* dq_g
#else
#define ZEROED_ARRAY
#endif

// Row `flat` of the arrays: of which sequence and head it is. Not every row of packed arrays is one of a sequence.
struct FlatRow {
  int batch, head, row;  // of the array
  bool exists;
  int64 delta;  // its item

#if PACKED
  __device__ __forceinline__ FlatRow(const GradientParams& params, const SequencePointers& pointers, int64 flat)
      : head(static_cast<int>(flat / params.packed.total_q)), row(static_cast<int>(flat % params.packed.total_q)) {
    const AttentionParams& longest = params.backward.attention;
    const PackedRows queries = packed_queries(params.packed, longest, pointers);
    batch = queries.last_from_of_warp(row, [&](int sequence) { return queries.of(sequence).begin; });
    const RowSpan rows = queries.of(batch);
    const int own = row - rows.begin;
    exists = head < longest.heads && own >= 0 && own < rows.count;
    delta = static_cast<int64>(rows.begin) * longest.heads + static_cast<int64>(head) * rows.count + own;
  }
#else
  __device__ __forceinline__ FlatRow(const GradientParams& params, const SequencePointers&, int64 flat) : delta(flat) {
    const AttentionParams& forward = params.attention;
    row = static_cast<int>(flat % forward.sq);
    head = static_cast<int>(flat / forward.sq % forward.heads);
    batch = static_cast<int>(flat / forward.sq / forward.heads);
    exists = batch < params.batch;
  }
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(attention_backward_f32_delta)(const DTYPE* dout_g, const DTYPE* out_g, const float* dlse_g,
                                        float* delta_g ZEROED_ARRAY PACKED_QUERIES, const GradientParams params) {
  const BackwardParams& backward = backward_of(params);
  const int64 flat = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const FlatRow own(params, {CU_SEQLENS_Q}, flat);
  if (!own.exists) return;  // the whole warp
  store_delta<HEAD_DIM_V>(delta_g + own.delta, backward, dout_g, out_g, dlse_g, own.batch, own.head, own.row);
#if PACKED
  float* dq_row_g = head_rows(dq_g, backward.dq, own.batch, own.head, own.row);
  for (int d = lane_index(); d < ZEROED_DIM; d += kWarpSize) dq_row_g[d] = 0.f;
#endif
}
