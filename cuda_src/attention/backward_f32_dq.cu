// Attention backward for float32 and bfloat16: the gradient of the queries, in float32 arithmetic throughout.
//
//   dq_i = softmax_scale * sum_j ds_ij k_j      (float_gradient.cuh)
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
// Tiles     TILE_Q queries, which the CTA owns, by TILE_K keys; products as in backward_f32_dkdv.cu.
// Grid      B * H * ceil(Sq / TILE_Q) CTAs of 128 threads; under causal order the longest rows start first.
// Budget    shared memory: one stage, and dS (TILE_K x TILE_Q floats); registers: dQ, S and dP, a 128th each.
// Edges     rows beyond the arrays are zeros and not stored; a row without keys gives dq = 0.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILE_Q) || !defined(TILE_K) || \
    !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, TILE_Q, TILE_K, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#include "float_gradient.cuh"

struct Traits : FloatTraits {
  using KRows = RowStage<Scalar, kPaddedDim, kVec>;
  static constexpr int kStageFloats = kSliceFloats > KRows::kFloats ? kSliceFloats : KRows::kFloats;
};

struct Smem {
  alignas(16) float stage[Traits::kStageFloats];
  alignas(16) float ds[Traits::kTileK * Traits::kTileQ];  // by key
  TileSums sums;
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    attention_backward_f32_dq(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                              const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                              const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                              const void* slopes_g, Traits::Scalar* dq_g, const BackwardParams params) {
  __shared__ Smem smem;
  const AttentionParams& forward = params.attention;

  // Phase 1: the rows, and the keys that any of them sees.
  const Place place = place_of_cta(forward, Traits::kTileQ, /*last_rows_first=*/true);
  const int batch = place.batch, head = place.head, first_row = place.first_row;
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, batch);
  const int rows = min(Traits::kTileQ, forward.sq - first_row);
  const int begin = window.of_row(first_row).begin / Traits::kTileK * Traits::kTileK;
  const int end = window.of_row(first_row + rows - 1).end;
  const Traits::Scalar* q_rows_g = head_rows(q_g, forward.q, batch, head, first_row);
  const Traits::Scalar* dout_rows_g = head_rows(dout_g, params.dout, batch, head, first_row);
  const Traits::Options options(forward, bias_g, mask_g, slopes_g, place, query_offset(forward, q_offsets_g, batch));
  const HeadScores head_scores = {params, window, options, head_rows(lse_g, forward.lse, batch, head, 0),
                                  delta_g + (static_cast<int64>(batch) * forward.heads + head) * forward.sq};

  // Phase 2: one tile of keys after the other.
  Product<Traits::kTileQ, Traits::kPaddedDim> dq;
  dq.clear();
#pragma unroll 1
  for (int first_key = begin; first_key < end; first_key += Traits::kTileK) {
    const int keys = min(Traits::kTileK, window.keys - first_key);
    const Traits::Scalar* k_rows_g = head_rows(k_g, forward.k, batch, place.kv_head, first_key);
    const Traits::Scalar* v_rows_g = head_rows(v_g, forward.v, batch, place.kv_head, first_key);
    FloatScores s, dp;
    const float sum = head_scores.fetch_sum(first_row);
    multiply_columns<Traits::kHeadDim, Traits::QStage, Traits::KStage>(s, smem.stage, q_rows_g, forward.q.seq, rows,
                                                                       k_rows_g, forward.k.seq, keys);
    HeadScores::store_sum(smem.sums, sum);
    multiply_columns<Traits::kHeadDimV, Traits::DoutStage, Traits::VStage>(dp, smem.stage, dout_rows_g, params.dout.seq,
                                                                           rows, v_rows_g, forward.v.seq, keys);
    head_scores.turn_to_gradients(s, dp, smem.sums, first_row, first_key, [](float, int, int) {});
    dp.store_by_key(smem.ds);
    multiply_rows<Traits::kTileK, Traits::kTileQ, Traits::KRows>(dq, smem.stage, smem.ds, k_rows_g, forward.k.seq, keys,
                                                                 Traits::kHeadDim);
  }

  // Phase 3: scale and store.
  store_product<Traits::kHeadDim>(dq, head_rows(dq_g, params.dq, batch, head, first_row), params.dq.seq, rows,
                                  params.scale, params);
}
