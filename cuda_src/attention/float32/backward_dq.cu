// Attention backward in float32 arithmetic throughout, of every dtype: the gradient of the queries.
//
//   dq_i = softmax_scale * sum_j ds_ij k_j      (score_gradient.cuh)
//
// The same bits from run to run, where attention_backward_f32_dkdv with ONE_PASS adds atomically.
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
// Tiles     TILE_Q queries, which the CTA owns, by TILE_K keys; products as in backward_dkdv.cu.
// Grid      B * H * ceil(Sq / TILE_Q) CTAs of 128 threads; under causal order the longest rows start first.
// Budget    shared memory: two buffers, and dS, or a part of it; registers: dQ, S and dP, a 128th each.
// Edges     rows beyond the arrays are zeros and not stored; a row without keys gives dq = 0.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILE_Q) || !defined(TILE_K) || \
    !defined(THREAD_ROWS) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, TILE_Q, TILE_K, THREAD_ROWS, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#include "score_gradient.cuh"

struct Traits : BackwardTraits {
  using KPanels = RowPanels<Scalar, kTileK, kPaddedDim, kVec>;
};

struct Smem {
  alignas(128) float buffers[2][kBufferFloats];
  union {
    TileSums sums;
    alignas(128) float ds[Traits::kWeightFloats];  // by key
  };
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    attention_backward_f32_dq(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                              const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                              const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                              const void* slopes_g MODIFIER_ARRAYS, Traits::Scalar* dq_g,
                              const BackwardParams params MODIFIER_STRIDES) {
  __shared__ Smem smem;
  const AttentionParams& forward = params.attention;

  // Phase 1: the rows, and the keys that any of them sees.
  const Place place = place_of_cta(forward, Traits::kTileQ, /*last_rows_first=*/true);
  const int batch = place.batch, head = place.head, first_row = place.first_row;
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, batch);
  const int rows = min(Traits::kTileQ, forward.sq - first_row);
  const int begin = window.of_row(first_row).begin / Traits::kTileK * Traits::kTileK;
  const int end = window.of_row(first_row + rows - 1).end;
  const Rows<Traits::Scalar> q = {head_rows(q_g, forward.q, batch, head, first_row), forward.q.seq, rows};
  const Rows<Traits::Scalar> dout = {head_rows(dout_g, params.dout, batch, head, first_row), params.dout.seq, rows};
  const Traits::Pass pass(forward, bias_g, mask_g, slopes_g, place, query_offset(forward, q_offsets_g, batch),
                          MODIFIERS);
  const HeadScores head_scores = {params, window, pass, head_rows(lse_g, forward.lse, batch, head, 0),
                                  delta_g + (static_cast<int64>(batch) * forward.heads + head) * forward.sq};

  const auto k_of = [&](int key) -> Rows<Traits::Scalar> {
    return {head_rows(k_g, forward.k, batch, place.kv_head, key), forward.k.seq, min(Traits::kTileK, end - key)};
  };

  // Phase 2: one tile of keys after the other.
  Product<Traits::kTileQ, Traits::kPaddedDim> dq;
  dq.clear();
  Buffers buffers(smem.buffers);
  const uint32 ds_s = shared_address(smem.ds);
  if (begin < end) buffers.begin(Traits::QKSlices{{q}, {k_of(begin)}});
#pragma unroll 1
  for (int first_key = begin; first_key < end; first_key += Traits::kTileK) {
    const Rows<Traits::Scalar> k = k_of(first_key);
    const Rows<Traits::Scalar> v = {head_rows(v_g, forward.v, batch, place.kv_head, first_key), forward.v.seq, k.rows};
    const Traits::DoutVSlices dout_v = {{dout}, {v}};
    const Traits::KPanels k_panels = {k, Traits::kHeadDim};
    const Traits::QKSlices next = {{q}, {k_of(first_key + Traits::kTileK)}};

    ScoreTile s, dp;
    const float2 sums = head_scores.fetch_sums(not_hoisted(first_row));
    multiply_columns<Traits::kHeadDim>(s, buffers, Traits::QKSlices{{q}, {k}}, dout_v);
    HeadScores::store_sums(smem.sums, sums);
    multiply_columns<Traits::kHeadDimV>(dp, buffers, dout_v, k_panels);
    head_scores.turn_to_gradients(s, dp, smem.sums, first_row, first_key, [](float, int, int) {});

    __syncthreads();  // ds: the sums have been read
    multiply_rows<Traits::kPartK>(dq, buffers, ds_s, k_panels, next,
                                  [&](int part) { dp.store_by_column<Traits::kPartK>(ds_s, part); });
  }

  // Phase 3: scale and store.
  store_product<Traits::kHeadDim>(dq, head_rows(dq_g, params.dq, batch, head, first_row), params.dq.seq, rows,
                                  params.scale, params);
}
